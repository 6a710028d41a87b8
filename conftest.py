"""What pytest leaves out for want of an optional package."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("torch") else ["sklearn_mhal/_torch.py"]
