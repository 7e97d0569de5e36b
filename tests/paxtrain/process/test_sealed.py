"""Sealed messages: only the two ends of a connection write them, each once and in order."""

import hashlib
import hmac
import struct

import pytest

from paxtrain.process import sealed
from paxtrain.process.sealed import ForgedError, Seal

SECRET, DIALLER, LISTENER = b"s" * 32, b"d" * 32, b"l" * 32
HEAD = 36


def ends(secret=SECRET, dialler=DIALLER, listener=LISTENER):
    return (Seal(secret, dialler, listener, dialled=True), Seal(SECRET, DIALLER, LISTENER, dialled=False))


def opened(seal: Seal, message: bytes) -> bytes:
    head = message[:HEAD]
    assert seal.length(head) == len(message) - HEAD
    return seal.open(head, message[HEAD:])


def test_messages_arrive_in_both_directions():
    one, other = ends()
    for content in (b"", b"{}", bytes(range(256))):
        assert opened(other, one.seal(content)) == content
        assert opened(one, other.seal(content)) == content


def test_the_seal_is_the_hmac_of_rfc_2104_over_place_length_and_content():
    key = hmac.new(SECRET, b"dialler" + DIALLER + LISTENER, hashlib.sha256).digest()
    one, _ = ends()
    for number, content in enumerate((b"first", b"second")):
        text = number.to_bytes(8, "big") + len(content).to_bytes(4, "big") + content
        expected = len(content).to_bytes(4, "big") + hmac.new(key, text, hashlib.sha256).digest() + content
        assert one.seal(content) == expected


@pytest.mark.parametrize(
    "changed",
    [{"secret": b"t" * 32}, {"dialler": b"x" * 32}, {"listener": b"x" * 32}],
    ids=["another secret", "another dialler", "recorded on another connection"],
)
def test_messages_of_others_are_refused(changed):
    one, other = ends(**changed)
    with pytest.raises(ForgedError):
        opened(other, one.seal(b"{}"))


@pytest.mark.parametrize("place", [0, 4, 20, HEAD, HEAD + 1])
def test_a_changed_bit_is_refused(place):
    one, other = ends()
    message = bytearray(one.seal(b"{}"))
    message[place] ^= 1
    with pytest.raises(ForgedError):
        other.length(bytes(message[:HEAD]))
        other.open(bytes(message[:HEAD]), bytes(message[HEAD:]))


def test_repeated_skipped_and_reflected_messages_are_refused():
    one, other = ends()
    first, second = one.seal(b"1"), one.seal(b"2")
    with pytest.raises(ForgedError):
        opened(other, second)
    with pytest.raises(ForgedError):  # its own words come back
        opened(one, first)
    assert opened(other, first) == b"1"
    with pytest.raises(ForgedError):
        opened(other, first)
    assert opened(other, second) == b"2"


def test_the_first_message_is_small_and_all_are_bounded():
    one, other = ends()
    for length, good in ((sealed.GREETING, True), (sealed.GREETING + 1, False), (1 << 31, False)):
        head = struct.pack(">I", length) + bytes(32)
        if good:
            assert other.length(head) == length
        else:
            with pytest.raises(ForgedError):
                other.length(head)
    opened(other, one.seal(b""))
    assert other.length(struct.pack(">I", sealed.LARGEST) + bytes(32)) == sealed.LARGEST
    with pytest.raises(ForgedError):
        other.length(struct.pack(">I", sealed.LARGEST + 1) + bytes(32))


@pytest.mark.parametrize("content", [b"", b"[1]", b"1", b"\xff", b"{", b"[" * 100_000, b"NaN"])
def test_what_is_no_json_object_is_refused(content):
    with pytest.raises(ForgedError):
        sealed.decode(content)


def test_control_characters_are_not_printed():
    assert sealed.printable("a\x1b[31mb\nc\u202ed é") == "a\\x1b[31mb\\x0ac\\x202ed é"
    assert len(sealed.printable("x" * 5000)) == 2000
