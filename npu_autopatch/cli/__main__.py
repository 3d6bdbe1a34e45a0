"""`python -m npu_autopatch.cli` is `npu-autopatch`."""

import sys

from npu_autopatch.cli import main

sys.exit(main())
