"""Moving MindIR files between machines: the graph stores the path of the operator library verbatim."""

import os
import shutil
import tempfile

from . import _lib

_LIBRARY = "libms_flashmla.so"


def relocate_mindir(src, dst):
    """Copies the MindIR file src to dst (they may be the same) so that its operators point at this package's library.

    Weights that MindSpore stored beside a large graph are copied along. Raises ValueError when src holds none of this
    package's operators or is no MindIR file, FileNotFoundError when it is not there.
    """
    from google.protobuf.message import DecodeError
    from mindspore.train.mind_ir_pb2 import ModelProto

    src, dst = os.fspath(src), os.fspath(dst)
    model = ModelProto()
    with open(src, "rb") as file:
        try:
            model.ParseFromString(file.read())
        except DecodeError as error:
            raise ValueError(f"src: {src} is not a MindIR file: {error}") from error
    if not sum([_relocate(primitive) for primitive in model.primitives]):
        raise ValueError(f"src: {src} holds no operator of ms_flashmla")
    _copy_weights(model, os.path.dirname(os.path.abspath(src)), os.path.dirname(os.path.abspath(dst)))
    content = model.SerializeToString()
    handle, new = tempfile.mkstemp(dir=os.path.dirname(os.path.abspath(dst)))  # beside it: dst is whole or as it was, and MindSpore's files are read-only
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(new, dst)


def _relocate(primitive):
    """Points an operator of this package at this package's library; False if it is none."""
    target = next((attribute.s.decode() for attribute in primitive.attribute if attribute.name == "func_name"), "")
    old = target.rpartition(":")[0]
    if os.path.basename(old) != _LIBRARY:
        return False
    for attribute in primitive.attribute:  # func_name, and uniq_name which repeats it
        attribute.s = attribute.s.replace(old.encode(), _lib.library_path().encode())
    return True


def _copy_weights(model, src_folder, dst_folder):
    """Copies the data files that the graph's parameters live in, by their paths relative to the MindIR file."""
    if src_folder == dst_folder:
        return
    for name in sorted({parameter.external_data.location for parameter in model.graph.parameter} - {""}):
        target = os.path.join(dst_folder, name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        shutil.copyfile(os.path.join(src_folder, name), target)
