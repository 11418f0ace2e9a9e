# SPDX-License-Identifier: Apache-2.0
"""Which keys a query may see."""

from .algebra import And as And
from .algebra import Coordinates as Coordinates
from .algebra import Mask as Mask
from .algebra import Not as Not
from .algebra import Or as Or
from .algebra import all_of as all_of
from .kinds import Causal as Causal
from .kinds import Chunked as Chunked
from .kinds import Document as Document
from .kinds import Full as Full
from .kinds import Local as Local
from .kinds import Numpy as Numpy
from .kinds import Predicate as Predicate
from .kinds import Prefix as Prefix
from .reach import Interval as Interval
from .reach import Reach as Reach
