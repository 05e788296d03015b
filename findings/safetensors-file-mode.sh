#!/usr/bin/env bash
# safetensors 0.8.0: save_file makes files that only their owner reads, and puts a new file in the place of a link.
#
# One would guess that save_file opens its path as any program does: a new file shows the permissions that the umask
# leaves (644), an existing one keeps its own, and a symbolic link is written through. 0.6.2 does so. 0.8.0 writes a
# temporary file of mode 600 and renames it: a model that was written into a shared folder is unreadable for the group,
# also where the old file was readable, and a link into a store of large files becomes a file beside it, while the
# store keeps the old weights.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q 'numpy==2.3.5' 'safetensors==0.8.0'
"$work/venv/bin/pip" install -q --no-deps --target "$work/old" 'safetensors==0.6.2'
cat > "$work/case.py" <<'EOF'
import os
import sys

import numpy
import safetensors
from safetensors.numpy import load_file, save_file

os.umask(0o022)
os.mkdir(sys.argv[1])
os.chdir(sys.argv[1])
save_file({"a": numpy.ones(3)}, "new")
with open("old", "w"):
    pass
os.mkdir("store")
save_file({"a": numpy.ones(3)}, "store/weights")
os.symlink("store/weights", "link")
for path in ("old", "link"):
    save_file({"a": numpy.zeros(3)}, path)
modes = [oct(os.stat(path).st_mode & 0o777) for path in ("new", "old")]
found = (*modes, os.path.islink("link"), float(load_file("store/weights")["a"][0]))
print(f"{safetensors.__version__}: new {found[0]}, old {found[1]}, link stays: {found[2]}, in the store: {found[3]}")
expected = {"0.6.2": ("0o644", "0o644", True, 0.0), "0.8.0": ("0o600", "0o600", False, 1.0)}
assert found == expected[safetensors.__version__], "the behaviour changed"
EOF
PYTHONPATH="$work/old" "$work/venv/bin/python" "$work/case.py" "$work/before"
"$work/venv/bin/python" "$work/case.py" "$work/now"
