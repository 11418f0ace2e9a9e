# SPDX-License-Identifier: Apache-2.0
"""Which keys a query may see."""

from .kinds import And as And
from .kinds import Causal as Causal
from .kinds import Chunked as Chunked
from .kinds import Coordinates as Coordinates
from .kinds import Document as Document
from .kinds import Full as Full
from .kinds import Local as Local
from .kinds import Mask as Mask
from .kinds import Not as Not
from .kinds import Numpy as Numpy
from .kinds import Or as Or
from .kinds import Prefix as Prefix
from .kinds import same_segment as same_segment
from .predicate import Predicate as Predicate
