"""The mesh's axes by role, as far as bytes and seconds depend on them: sizes only."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axes:
    """Devices along the axes of a mesh, by role.

    A weight that is held over `axes` axes is held whole within the `axes` slowest
    ones and split over the others: with data axes of 2 x 2 x 2 and `axes` of 0, 1, 2,
    3 a device has 1/8, 1/4, 1/2 or all of it.

    Attributes:
      data: Sizes of the axes over which rows and frozen weights are split, slowest
        link first.
    """

    data: tuple[int, ...]

    @property
    def whole(self) -> int:
        """Number of axes over which a weight is held that every device has whole."""
        return len(self.data)

    @property
    def lowest(self) -> int:
        """Least number of axes that a weight can be held over: one device has all."""
        return self.whole if self.num_devices == 1 else 0

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.data)

    def sharing(self, axes: int) -> int:
        """Devices that share a weight which is held over `axes` axes."""
        return math.prod(self.data[axes:])

    def gathering(self, first: int, end: int) -> int:
        """Devices of a gather that leads from `first` to `end` axes held."""
        return math.prod(self.data[first:end])
