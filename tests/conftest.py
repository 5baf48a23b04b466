"""What every test shares: the tests' own folder importable, one thread a worker, no deadlines."""

import os
import sys
from pathlib import Path

# Before torch is imported, here or in a process a test starts: workers must not fight for cores.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

sys.path.insert(0, str(Path(__file__).parent))

try:
    from hypothesis import settings
except ImportError:
    pass
else:
    settings.register_profile("k3", deadline=None, derandomize=True, print_blob=True)
    settings.load_profile("k3")
