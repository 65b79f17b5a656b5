"""Streamed text equals the text decoded at once: characters, special tokens, stop strings."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from serve.text.detokenizer import Detokenizer
from serve.text.stop import StopMatcher
from serve.text.stream import TextStream

BROKEN = "\ufffd"


def byte_level() -> Tokenizer:
    """Every byte is a token (ids 0 to 255 in the alphabet's order), then a few merges and a special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "a"), ("ð", "Ł"), ("ĺ", "Ģ"), ("t", "h"), ("th", "e")]
    vocab = {symbol: index for index, symbol in enumerate(alphabet + [a + b for a, b in merges])}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """The Llama 2 family's way: words with a leading mark, bytes as <0xNN>."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for piece in ("▁", "a", "b", "▁a", "▁hello", "<unk>"):
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


LEVEL, FALLBACK = byte_level(), byte_fallback()


def deltas(tokenizer: Tokenizer, token_ids: list[int], prompt: list[int] | None = None) -> list[str]:
    stream = Detokenizer(tokenizer, prompt or [])
    return [stream.push(token_id) for token_id in token_ids]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, LEVEL.get_vocab_size() + 2), max_size=60))
def test_any_tokens_add_up_to_their_full_decoding(token_ids):
    full = LEVEL.decode(token_ids, skip_special_tokens=True)
    streamed = "".join(deltas(LEVEL, token_ids))
    assert full.startswith(streamed) and full[len(streamed) :].strip(BROKEN) == ""


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=20), st.text(max_size=20), st.sampled_from([LEVEL, FALLBACK]))
def test_real_text_comes_out_whole_after_any_prompt(prompt, text, tokenizer):
    prompt, text = prompt.replace(BROKEN, ""), text.replace(BROKEN, "") + "a"
    prompt_ids = [i for i in tokenizer.encode("a" + prompt, add_special_tokens=False).ids]
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = deltas(tokenizer, token_ids, prompt_ids)
    assert "".join(pieces) == text and not any(BROKEN in piece for piece in pieces)


def test_bytes_of_a_character_are_held_back_until_it_is_whole():
    emoji = [LEVEL.token_to_id(symbol) for symbol in "ðŁĺĢ"]
    assert deltas(LEVEL, emoji) == ["", "", "", "😀"]
    assert deltas(FALLBACK, [0xF0, 0x9F, 0x98, 0x80, 0xE2, 0x82, 0xAC]) == ["", "", "", "😀", "", "", "€"]


def test_a_character_begun_by_the_prompt_is_finished():
    begun, rest = [LEVEL.token_to_id(s) for s in "ðŁ"], [LEVEL.token_to_id(s) for s in "ĺĢa"]
    assert deltas(LEVEL, rest, begun) == ["", "😀", "a"]


def test_endless_garbage_is_not_held_for_ever():
    garbage = [LEVEL.token_to_id("Ģ")] * 500
    assert len("".join(deltas(LEVEL, garbage))) == 499


def test_the_space_after_the_prompt_is_kept():
    hello = FALLBACK.token_to_id("▁hello")
    assert deltas(FALLBACK, [hello, hello], [hello]) == [" hello", " hello"]
    assert deltas(FALLBACK, [hello, hello]) == ["hello", " hello"]


def test_special_tokens_are_shown_only_on_request():
    end = LEVEL.token_to_id("<|end|>")
    assert Detokenizer(LEVEL).push(end) == ""
    assert Detokenizer(LEVEL, skip_special_tokens=False).push(end) == "<|end|>"


def reference_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character, as slowly as it is defined."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            longest = max(done, key=len)
            return text[: end - len(longest)], longest
    return text, None


SMALL = st.text(alphabet="ab€", max_size=30)


@settings(max_examples=300, deadline=None)
@given(SMALL, st.lists(st.text(alphabet="ab€", min_size=1, max_size=4), max_size=4), st.data())
def test_stop_strings_do_not_depend_on_the_cuts(text, stops, data):
    matcher, out, position = StopMatcher(stops), "", 0
    while position < len(text):
        size = data.draw(st.integers(1, 5))
        out += matcher.push(text[position : position + size])
        position += size
        expected, _ = reference_stop(text, stops)
        assert expected.startswith(out)
    assert (out + matcher.flush(), matcher.matched) == reference_stop(text, stops)


@pytest.mark.parametrize("stop", ["END", "D"])
def test_a_stop_string_across_tokens_is_cut_out(stop):
    stream = TextStream(LEVEL, [], stop=[stop])
    out = "".join(stream.push(LEVEL.token_to_id(letter)) for letter in "xENDy") + stream.finish()
    assert (out, stream.stop_reason) == (("x", "END") if stop == "END" else ("xEN", "D"))


def test_held_back_text_comes_at_the_end():
    stream = TextStream(LEVEL, [], stop=["END"])
    assert "".join(stream.push(LEVEL.token_to_id(letter)) for letter in "xEN") == "x"
    assert (stream.finish(), stream.stop_reason) == ("EN", None)
