"""Options of codecs and of architectures in the configuration, and the places that have codecs."""

PLACES = ("backward", "forward", "data")  # what can go through a codec, low rank's or another
LINKED = ("backward", "forward")  # those of the messages between stages, which may be compressed on some links only
OTHERS = ("weights", "outer", "embedding", "context")  # what can go through another only
PROBED = (*PLACES, "embedding")  # what a probe of the loss can tell of
REDUCED = ("data", "outer")  # what a reducer can take in place of a codec


class OptionValues(dict):
    """Values by option. It is hashable, so it must not be changed."""

    def __hash__(self) -> int:  # type: ignore[override]  # a dict has none
        try:
            return hash(frozenset(self.items()))
        except TypeError:  # a file's values may be lists, which are refused later
            return hash(frozenset(self))


NO_OPTIONS = OptionValues()
