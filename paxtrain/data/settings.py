"""tokenizer_config.json, beside a tokenizer.json: what begins and ends documents, in the words of transformers.

    bos_token               token before a document: the one that begins it, or the one that ended the document before
    add_bos_token           whether documents begin with it; the post-processor of the tokenizer.json puts it in front
    eos_token               token that ends a document
    split_special_tokens    whether special tokens that a text spells are encoded like any other text

`prepare` writes it, a run keeps it beside its checkpoints, `sample` and an export read it there. An imported model's
has more, such as its chat template, and its generation_config.json names further tokens that end a text.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from paxtrain import files
from paxtrain.data.tokenizer import END_OF_TEXT
from paxtrain.errors import UserError

FILE, GENERATION, TEMPLATE = "tokenizer_config.json", "generation_config.json", "chat_template.jinja"
_MAP = "special_tokens_map.json"  # of older models
CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}  # of transformers, for any tokenizer.json
_OF_DATA = ("bos_token", "add_bos_token", "eos_token", "split_special_tokens")
TokenizerSettings = dict[str, Any]


def _object(values: object) -> TokenizerSettings:
    if not isinstance(values, dict):
        raise UserError(f"it must hold an object, got {type(values).__name__}")
    return values


def read_object(path: pathlib.Path, instead: str = "write it anew, or remove it") -> TokenizerSettings:
    """Return the object that a file holds as JSON.

    Args:
        path: the file.
        instead: what would work if it cannot be read.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    return files.read_json(path, "file", instead, _object)


def read(folder: pathlib.Path) -> TokenizerSettings:
    """Return the settings of a folder's tokenizer; none if it has no such file.

    A chat template that lies beside the file is put into it, and so are tokens that only a file of older models names.

    Raises:
        UserError: a file cannot be read, or is no JSON.
    """
    found = read_object(folder / FILE) if (folder / FILE).exists() else {}
    more = read_object(folder / _MAP) if (folder / _MAP).exists() else {}
    found |= {name: text for name in more if not found.get(name) and (text := token(more, name))}
    if (folder / TEMPLATE).is_file():
        try:
            found["chat_template"] = (folder / TEMPLATE).read_text("utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read the chat template {folder / TEMPLATE} ({error})") from error
    return found


def text(settings: TokenizerSettings) -> str:
    """Return the content of the file of settings."""
    return json.dumps(settings, indent=2) + "\n"


def token(settings: Mapping[str, object], name: str) -> str | None:
    """Return the text of a token, which settings give as text or as an object with its content."""
    found = settings.get(name)
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) else None


def marks(settings: Mapping[str, object]) -> tuple[str | None, str | None]:
    """Return the tokens with which documents begin (None: with the text) and end."""
    return token(settings, "bos_token") if settings.get("add_bos_token") else None, token(settings, "eos_token")


def of_data(settings: TokenizerSettings, begin: str | None, end: str, special: bool) -> TokenizerSettings:
    """Return the settings of prepared data.

    Args:
        settings: those of the tokenizer's model, or none.
        begin: token with which documents begin; None: they begin with the text.
        end: token with which documents end.
        special: whether special tokens that a text spells are encoded as their ids.
    """
    ours = {"bos_token": begin or end, "add_bos_token": begin is not None, "eos_token": end}
    return CLASS | {"pad_token": end} | settings | ours | {"split_special_tokens": not special}


def of_run(model: TokenizerSettings, data: Sequence[TokenizerSettings]) -> TokenizerSettings:
    """Return the settings of a run.

    Args:
        model: those of the model that was imported, or that the run has kept; none if there is none.
        data: those of its training sets; prompts get the rule for special tokens of a set that encodes them as ids.
    """
    if not data:
        return model
    kept = next((each for each in data if not each.get("split_special_tokens")), data[0])
    return kept | model | {name: kept[name] for name in _OF_DATA if name in kept}


def ends(folder: pathlib.Path, tokenizer: Tokenizer, vocabulary: int) -> list[int]:
    """Return the ids that end a text which the model of a run or of a folder generates, the usual one first.

    Args:
        folder: folder with the settings.
        tokenizer: its tokenizer.
        vocabulary: number of ids of the model.

    Raises:
        UserError: a file cannot be read, or is no JSON.
    """
    settings = read(folder)
    end = tokenizer.token_to_id(token(settings, "eos_token") or ("" if settings else END_OF_TEXT))
    more = read_object(folder / GENERATION).get("eos_token_id") if (folder / GENERATION).exists() else []
    found = [end, *(more if isinstance(more, list) else [more])]
    return list(dict.fromkeys(each for each in found if type(each) is int and 0 <= each < vocabulary))
