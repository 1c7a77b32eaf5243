"""Both ceilings of the machine, sampled again and again between the cases: the machine is shared, and its speed is not one number."""

import ctypes
import os
import statistics
from collections import namedtuple
from pathlib import Path

STREAM_BYTES = 1 << 30
FMA_ROUNDS = 1_500_000  # about 7 ms on two AVX-512 cores

Sample = namedtuple("Sample", "fma_gflops read_gb_per_s")


def native():
    """The benchmark's own library (benchmarks/native), which `bash build.sh bench` builds and names in FLASHMLA_BENCH_LIB."""
    path = os.environ.get("FLASHMLA_BENCH_LIB")
    if not path:
        raise SystemExit("benchmarks/native is not built: run `bash build.sh bench`")
    lib = ctypes.CDLL(path)
    pointer, int64, double = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    lib.bench_fma_gflops.restype, lib.bench_fma_gflops.argtypes = double, [ctypes.c_char_p, ctypes.c_int, int64]
    lib.bench_map.restype, lib.bench_map.argtypes = pointer, [int64, ctypes.c_int]
    lib.bench_read_gb_per_s.restype, lib.bench_read_gb_per_s.argtypes = double, [pointer, int64, ctypes.c_int]
    lib.bench_attributes.restype = pointer
    lib.bench_set_int.argtypes = [pointer, ctypes.c_char_p, int64]
    lib.bench_set_float.argtypes = [pointer, ctypes.c_char_p, ctypes.c_float]
    lib.bench_init.argtypes = [pointer] * 5
    lib.bench_call.restype, lib.bench_call.argtypes = double, [pointer, ctypes.c_int, pointer, pointer, pointer, pointer, pointer]
    return lib


def huge_share(address, nbytes):
    """Share of the memory at address that lies on transparent huge pages, from 0 to 1."""
    end, overlaps, huge, size = address + nbytes, False, 0, 0
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        field = line.split(maxsplit=2)
        if "-" in field[0] and not field[0].endswith(":"):
            first, last = (int(x, 16) for x in field[0].split("-"))
            overlaps = first < end and last > address
        elif overlaps and field[0] == "Size:":
            size += int(field[1]) * 1024
        elif overlaps and field[0] == "AnonHugePages:":
            huge += int(field[1]) * 1024
    return huge / size if size else 0.0


class Ceilings:
    """sample() measures both ceilings once, about 45 ms; all of a run's samples are kept."""

    def __init__(self, isa, threads):
        self._lib, self._isa, self.threads = native(), isa.encode(), threads
        self._huge, self._small = (self._lib.bench_map(STREAM_BYTES, huge) for huge in (1, 0))
        if not self._huge or not self._small:
            raise MemoryError("the bandwidth ceiling needs 2 GiB")
        self.huge_share = huge_share(self._huge, STREAM_BYTES)
        self.samples, self.small_page_gb_per_s = [], []
        self.one_thread = []  # what one thread reaches, for the lines of one thread

    def _measure(self, threads):
        return Sample(self._lib.bench_fma_gflops(self._isa, threads, FMA_ROUNDS),
                      self._lib.bench_read_gb_per_s(self._huge, STREAM_BYTES, threads))

    def sample(self, one_thread=False):
        """The ceilings of all threads, and of one as well when it is asked for: (Sample, Sample or None)."""
        self.samples.append(self._measure(self.threads))
        if one_thread:
            self.one_thread.append(self._measure(1))
        return self.samples[-1], self.one_thread[-1] if one_thread else None

    def sample_small_pages(self):
        self.small_page_gb_per_s.append(self._lib.bench_read_gb_per_s(self._small, STREAM_BYTES, self.threads))


def median(samples):
    """The Sample of the medians."""
    return Sample(*(statistics.median(column) for column in zip(*samples)))
