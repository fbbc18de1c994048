"""ByT5's tokenizer in its fast form: a byte is a token. transformers 5.23 has a slow one only,
which has no content that a token store could be named after.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode


def fast(slow: ByT5Tokenizer) -> PreTrainedTokenizerFast:
    """The same ids for every text, special tokens included: byte b is id b + 3, behind pad, end and
    unknown. Bytes that are no UTF-8 are decoded to U+FFFD, where the slow one drops them.
    """
    special: dict[int, Any] = dict(slow.added_tokens_decoder)
    of_byte = {char: byte + slow.offset for byte, char in bytes_to_unicode().items()}
    vocabulary = of_byte | {str(token): number for number, token in special.items()}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    end = str(slow.eos_token)
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, slow.eos_token_id)]
    )
    backend.add_special_tokens([special[number] for number in sorted(special)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=str(slow.pad_token),
        eos_token=end,
        unk_token=str(slow.unk_token),
        clean_up_tokenization_spaces=False,
    )
