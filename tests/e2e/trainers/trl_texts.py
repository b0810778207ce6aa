"""Texts and a tokenizer for TRL's trainers."""

from language import Texts
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_WORDS = {"<pad>": 0, "<eos>": 63, **{f"w{number}": number for number in range(1, 63)}}
_tokens = Tokenizer(models.WordLevel(_WORDS, unk_token="<pad>"))
_tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
TOKENIZER = PreTrainedTokenizerFast(
    tokenizer_object=_tokens, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
)
TEXTS = [[min(word, 62) for word in text] for text in Texts().texts]


def words(text: list[int]) -> str:
    return " ".join(f"w{word}" for word in text)
