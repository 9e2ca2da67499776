"""Which pictures' features are on the device, who needs them, and which are kept for the next who asks.

Numbers and names only; the tensors are the runner's. A request holds its pictures from its admission until it
ends, preemptions included. That makes three promises simple:

- pictures in use and pictures kept have together at most `capacity` slots of features. A request is not
  admitted before there is room for all of its pictures, so none gets stuck half way; the pictures that
  nobody holds make room, the one given up longest ago first;
- whoever asks for a picture that is there, or on its way, shares it: it is encoded once;
- the tiles leave the host as soon as all of them are encoded: while a request may come to need them again,
  the features cannot go.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from server.engine.request import Picture, RequestImage


class VisionCacheError(RuntimeError):
    """The books of the vision cache do not balance: a bug, never the user's doing."""


class VisionCache:
    """Room for `capacity` slots: what a picture takes in the prompt, it takes here."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_hits = 0  # images that found their picture here
        self._held: dict[bytes, Picture] = {}
        self._kept: OrderedDict[bytes, Picture] = OrderedDict()  # whole, given up longest ago first
        self._dropped: list[bytes] = []
        self._slots_held = 0
        self._slots_kept = 0

    def hold(self, images: Sequence[RequestImage]) -> bool:
        """Give every image its picture, and take its tiles over; False, with nothing changed, if there is no room."""
        wanted = {image.key: image.length for image in images if image.key not in self._held}
        if self._slots_held + sum(wanted.values()) > self.capacity:
            return False
        for image in images:
            picture = self._held.get(image.key)
            if picture is None:
                picture = self._held[image.key] = self._take(image)
                self._slots_held += picture.num_slots
            else:
                self.num_hits += 1
            picture.holders += 1
            image.picture = picture
            image.tiles = b""
        self._make_room()
        return True

    def release(self, images: Iterable[RequestImage]) -> None:
        """Give up the pictures of a request that ends. Only whole ones are kept."""
        for image in images:
            picture, image.picture = image.picture, None
            image.tiles = b""
            if picture is None:  # the request was never admitted
                continue
            picture.holders -= 1
            if picture.holders == 0:
                del self._held[picture.key]
                self._slots_held -= picture.num_slots
                self._keep(picture)
        self._make_room()

    def take_dropped(self) -> list[bytes]:
        """Keys of the pictures whose features have to leave the device since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def check_integrity(self, held: Iterable[RequestImage]) -> None:
        """Raise VisionCacheError unless `held`, the images of all requests, are what holds the pictures."""
        holders = dict.fromkeys(self._held, 0)
        for image in held:
            if image.picture is not None and self._held.get(image.key) is not image.picture:
                raise VisionCacheError("a request holds a picture that is not there")
            if image.picture is not None:
                holders[image.key] += 1
        if holders != {key: picture.holders for key, picture in self._held.items()} or 0 in holders.values():
            raise VisionCacheError(f"the holders of {len(self._held)} pictures differ from their count")
        if self._slots_held != sum(picture.num_slots for picture in self._held.values()):
            raise VisionCacheError("the slots of the pictures in use differ from their count")
        if self._slots_kept != sum(picture.num_slots for picture in self._kept.values()):
            raise VisionCacheError("the slots of the pictures kept differ from their count")
        if self._slots_held + self._slots_kept > self.capacity:
            raise VisionCacheError(f"more than {self.capacity} slots in use")

    def _take(self, image: RequestImage) -> Picture:
        """The image's picture, for its first holder."""
        picture = self._kept.pop(image.key, None)
        if picture is None:
            return Picture(image.key, image.columns, image.rows, image.length, image.tiles)
        self._slots_kept -= picture.num_slots
        self.num_hits += 1
        return picture

    def _keep(self, picture: Picture) -> None:
        if picture.is_whole:
            self._kept[picture.key] = picture
            self._slots_kept += picture.num_slots
        else:
            self._dropped.append(picture.key)

    def _make_room(self) -> None:
        while self._slots_held + self._slots_kept > self.capacity:
            key, picture = self._kept.popitem(last=False)
            self._slots_kept -= picture.num_slots
            self._dropped.append(key)
