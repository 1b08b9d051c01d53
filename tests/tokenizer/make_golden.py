"""Make tests/golden/tokenizer/gemma4_tiny_ids.json: `python tests/tokenizer/make_golden.py`.

Needs transformers, which nothing else here does. The ids are those of transformers on the
tokenizer.json that the bundled model was converted from (rebuilt by `tokenizer_json`, and equal to
it in vocabulary, merges, added tokens, normalizer, split and decoder).
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

import tokenizers
import transformers  # type: ignore[import-not-found, unused-ignore]
from tokenizer_files import TESTS, tokenizer_json

SEED = 7
PROMPTS = [
    "The :mod:`json` module", "This function returns a list of", "Changed in version 3.",
    "import asyncio\n\nasync def main():\n", "Return ``True`` if", ".. class:: ",
    "The following example shows how to", "If the *encoding* argument is",
    ".. function:: open(file, mode='r')\n\n   Open *file* and return a :term:`file object`.\n",
    "``literal``, *emphasis* and **strong**", '>>> print("Hello, World!")\nHello, World!\n',
    "def f(x):\n    return x ** 2\n", "https://docs.python.org/3/library/json.html?x=1&y=%20#top",
    "1234567890 3.14159 1e-5 0xFF",
]  # fmt: skip
SPACES = [
    "", " ", "  ", "   x   ", "\n", "\n\n", "\n\n\n", "\n" * 7, "a\n\nb\n c\n\n\nd", "\r\n", "\r",
    "\r\n\r\nx", " \n \n ", "\t", "\t\tx\t", "a\tb  c   d    e     f", " " * 16, " " * 33 + "x",
    "x" + " " * 40, "-" * 9, "=" * 50,
]  # fmt: skip
UNICODE = [
    "\0", "a\0b", "\x01\x02\x1b[0m\x7f", "\x85\u2028\u2029\xa0\u200b\u200d\ufeff",
    "naïve café Ångström ÆØÅ ß İıſ", "e\u0301 vs é", "Привет, мир", "שלום עולם",
    "مرحبا بالعالم", "नमस्ते दुनिया", "สวัสดีชาวโลก", "你好，世界。", "こんにちは世界",
    "안녕하세요", "𝒜𝓑𝔠 𐍈 𓀀", "🤗", "👩‍👩‍👧‍👦 family", "🇩🇪🇺🇸", "✂️❤️‍🔥", "🤔➡️🌱", "▁", "a▁b ▁ c",
    "▁▁", "Ω≈ç√∫˜µ≤≥÷", "\ufffd\ufffe\uffff\U0010ffff",
]  # fmt: skip
MARKERS = [
    "<bos>", "<eos>", "<bos>hello", "hello<eos>", "<pad><unk><mask>",
    "<|turn>user\nHi<turn|>\n<|turn>model\n", "<turn|>", "<|turn", "turn|>", "<unused0>x<unused8>",
    "<unused9>", "<0x41>", "<0x0A>", "a<0xE2><0x96><0x81>b", "<|tool_call>", "< bos>", "<<bos>>",
    "<bos><bos>", " <bos> ", "\n<bos>\n", "<BOS>", "<s>", "</s>",
]  # fmt: skip
PLAIN = ["<bos>hello<|turn>user", "<unused0><eos>", "a<0x41><unk>"]
POOLS = [
    range(32, 127), range(0, 32), range(0xA0, 0x250), range(0x370, 0x600), range(0x900, 0xE00),
    range(0x1F300, 0x1F700), range(0x4E00, 0x9FFF), [9, 10, 13, 32, 0x2581], range(0x2000, 0x2070),
    [*range(0xD800), *range(0xE000, 0x110000)],
]  # fmt: skip


def random_texts() -> list[str]:
    rng = random.Random(SEED)
    mixed = ["<bos>", "<|turn>", "<turn|>", "<eos>", "<unused3>", "<0x20>", "\n\n", "  ", "▁"]
    texts = []
    for _ in range(60):
        parts = []
        for _ in range(rng.randint(1, 24)):
            pool = rng.choice(POOLS)
            run = "".join(chr(rng.choice(pool)) for _ in range(rng.randint(1, 4)))
            parts.append(rng.choice(mixed) if rng.random() < 0.15 else run)
        texts.append("".join(parts))
    return texts


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_text(json.dumps(tokenizer_json()), "utf-8")
        make = transformers.PreTrainedTokenizerFast
        parsed = make(tokenizer_file=str(path))
        plain = make(tokenizer_file=str(path), split_special_tokens=True)
    texts = [*PROMPTS, *SPACES, *UNICODE, *MARKERS, *random_texts()]
    result = {
        "origin": {
            "made_by": "tests/tokenizer/make_golden.py", "seed": SEED,
            "transformers": transformers.__version__, "tokenizers": tokenizers.__version__,
            "note": "cases: control tokens parsed; plain: left as text (split_special_tokens). "
            "Id 2 begins each: it is prepended here, the tokenizer.json has no rule for it.",
        },
        "cases": [{"text": text, "ids": [2, *parsed(text).input_ids]} for text in texts],
        "plain": [{"text": text, "ids": [2, *plain(text).input_ids]} for text in PLAIN],
    }  # fmt: skip
    out = TESTS / "golden" / "tokenizer" / "gemma4_tiny_ids.json"
    out.write_text(json.dumps(result, separators=(",", ":")) + "\n", "ascii")


if __name__ == "__main__":
    main()
