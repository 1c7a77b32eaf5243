"""The softmax with one maximum for all rows: inside its window the online form's results, outside it those rows anew."""
from dataclasses import replace

import numpy as np
import pytest

import ms_flashmla as fm
import reference
from cases import LayerCase, OpCase, assert_close, assert_lse, to_ms, to_np
from driver import Driver
from test_ops import tensors


def attend(case, arrays, phi):
    return fm.ops.flash_mla_with_kvcache(*tensors(case, arrays), case.d_v, case.scale, case.causal, softmax_phi=phi)


def hold(case, arrays, phi):
    out, lse = attend(case, arrays, phi)
    out_ref, lse_ref, biggest = reference.flash_mla_with_kvcache(*arrays, case.d_v, case.scale, case.causal)
    assert_close(to_np(out), out_ref, case.dtype, biggest)
    assert_lse(to_np(lse), lse_ref, biggest)


CASE = OpCase("unified", (700, 3, 0, 130), h_q=20)


@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
@pytest.mark.parametrize("phi", (0.0, 7.5, -30.0))
def test_inside_the_window_nothing_is_lost(dtype, phi):
    case = replace(CASE, dtype=dtype)
    hold(case, case.arrays(), phi)


@pytest.mark.parametrize("phi", (200.0, -200.0, 1e5, -1e5))
def test_rows_outside_the_window_are_computed_again(phi):
    hold(CASE, CASE.arrays(), phi)


@pytest.mark.parametrize("logit", (200.0, -200.0, -1e5))
def test_huge_logits_equal_the_online_form(logit):
    """Every second head far outside the window: those rows take the online form, the others stay."""
    case = replace(CASE, scale=1.0)
    q, k, table, seqlens = case.arrays()
    q, k = np.array(q) * 0, np.array(k)
    k[..., 0] = 1.0
    q[:, :, ::2, 0] = logit
    arrays = (q, k, table, seqlens)
    out, lse = attend(case, arrays, 0.0)
    online_out, online_lse = attend(case, arrays, None)
    np.testing.assert_array_equal(to_np(out)[:, :, ::2], to_np(online_out)[:, :, ::2])
    np.testing.assert_array_equal(to_np(lse)[:, ::2], to_np(online_lse)[:, ::2])
    hold(case, arrays, 0.0)


def test_layer_with_phi_is_right_in_every_step():
    driver = Driver(LayerCase("unified", {}), layer_kwargs={"softmax_phi": 0.0})
    for q_lens in ([5, 70], [1, 1], [3, 0], [1, 2]):
        driver.step(q_lens)


def test_calibration_proposes_a_phi_inside_the_window():
    arrays = CASE.arrays()
    _, lse = attend(CASE, arrays, None)
    phi = fm.ops.calibrate_phi(lse)
    assert np.isfinite(phi) and abs(phi - np.median(to_np(lse)[np.isfinite(to_np(lse))])) < 1e-6
    with pytest.raises(ValueError, match="lse"):
        fm.ops.calibrate_phi(np.array([np.inf]))
    with pytest.raises((ValueError, TypeError), match="softmax_phi"):
        attend(CASE, arrays, float("nan"))
