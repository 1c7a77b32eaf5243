"""python -m ms_flashmla"""

import sys

from .cli import main

sys.exit(main())
