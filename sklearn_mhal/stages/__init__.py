"""The stages of the algorithm, in the order of the paper.

============== ================================= ============== ===================
stage          estimates                         paper          module
============== ================================= ============== ===================
crude sum      the sum of the projections        section 2      :mod:`.crude_sum`
sculpt         a body around the attention       section 3      :mod:`.sculpt`
               matrices
refine sum     the sum, on agreeing rows         section 4      :mod:`.refine_sum`
span           the span of the attention         section 5      :mod:`.span`
               matrices
heads          every head, and their number      section 6      :mod:`.heads`
polish         all digits                        beyond it      :mod:`.polish`
certificate    what the data proves              beyond it      :mod:`.certify`
uncertainty    standard errors                   beyond it      :mod:`.uncertainty`
============== ================================= ============== ===================

A stage is a function on examples with keyword-only settings; it returns one frozen dataclass and
knows nothing of the estimator.
"""

from ._count import find_heads
from .certify import Certificate, certify
from .crude_sum import CrudeSum, estimate_crude_sum
from .heads import Heads
from .polish import Polish, polish, residual_of
from .refine_sum import EXACT_AGREEMENT, RefinedSum, refine_sum
from .sculpt import Sculpture, sculpt
from .span import Span, estimate_span
from .uncertainty import Uncertainty, estimate_uncertainty

__all__ = [
    "EXACT_AGREEMENT",
    "Certificate",
    "CrudeSum",
    "Heads",
    "Polish",
    "RefinedSum",
    "Sculpture",
    "Span",
    "Uncertainty",
    "certify",
    "estimate_crude_sum",
    "estimate_span",
    "estimate_uncertainty",
    "find_heads",
    "polish",
    "refine_sum",
    "residual_of",
    "sculpt",
]
