"""torchrun [--nnodes N] launch/main.py --config C [--roles ...]: one slot of a run; see docs/launch.md."""

import os
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)

# A checkout needs no installation, here and in the role processes.
sys.path.insert(0, ROOT)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))

from flashflow.launch.slot import main  # noqa: E402

if __name__ == "__main__":
    main()
