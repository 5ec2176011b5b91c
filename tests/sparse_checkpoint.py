"""Large checkpoints that take no room on disk, and the memory that their conversion takes."""

import json
import math
import os
import subprocess
import sys
import textwrap


def write_sparse(folder, config, shapes) -> int:
    """A folder with this config and float32 weights of these shapes, all zero; the bytes of the weights."""
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return end


def conversion_megabytes(folder) -> float:
    """How far the conversion to int8 raises the peak memory of an interpreter of its own."""
    code = textwrap.dedent("""
        import resource, sys
        from tinyloop_py.convert import convert
        import tinyloop_py.convert.huggingface
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        convert(sys.argv[1], sys.argv[1] + "/m.tinyloop", dtype="int8", tokenizer=False)
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
    """)
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    env = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    run = subprocess.run([sys.executable, "-c", code, str(folder)], env=env, capture_output=True, text=True, check=True)
    (folder / "m.tinyloop").unlink()
    return float(run.stdout)
