"""The vowels of Arabic from its letters: ``arabic-diacritizer`` 1.0.0, three bidirectional LSTM layers and additive attention.

The network is the package's own torch class, imported from its wheel, with the weights that are beside it. What case a noun
is in, and so the vowel that it ends with, depends on the word before it: *waṣala r-rajul-u*, "the man arrived", and *ʿalā
r-rajul-i*, "on the man".
"""

from __future__ import annotations

import io
import sys
from importlib import import_module

import torch
from torch import Tensor, nn

from real_models import fetch

NOUNS = """
    الولد الرجل البيت القلب الكلب النهر البحر الجبل القمر الشيخ الملك الأمر الخبر العلم الوزن الجيش القوم المطر الخبز
    الثلج الوقت الدرس الصوت العبد الليل اليوم الشعب الحرب القبر السيف الفرس الجمل الحجر الشجر النجم القصر السوق الباب
    الحبل اللحم
"""
SUBJECT, AFTER_PREPOSITION = (
    "وصل {} ليلا",
    "على {} ليلا",
)  # "... arrived at night", "on ... at night", letter by letter alike
PREPOSITION, STEM, ENDING = (
    2,
    6,
    8,
)  # positions: the last letter of the first word, the noun's first and last of its stem
FATHA, KASRA = 1, 3  # classes: -a, and -i, which is the ending after a preposition


def load() -> nn.Module:
    """The trained network, with its tokenizer."""
    wheel = str(fetch.fetch(fetch.DIACRITIZER))
    sys.path.insert(0, wheel)
    try:
        package = import_module("diacritize.baseline.model")
    finally:
        sys.path.remove(wheel)
    weights = io.BytesIO(fetch.read(fetch.DIACRITIZER, "assets/bilstm_best.pt"))
    tokenizer = package.CharTokenizer()
    model = package.BiLSTMDiacritizer(vocab_size=tokenizer.vocab_size)
    model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    model.tokenizer = tokenizer
    return model.eval()


def sentences(module: nn.Module) -> Tensor:
    """Each noun as a subject in the even rows, after a preposition in the odd ones. (sentence, letter)"""
    texts = [frame.format(noun) for noun in NOUNS.split() for frame in (SUBJECT, AFTER_PREPOSITION)]
    return torch.tensor([module.tokenizer.encode(text, add_special=False) for text in texts])


def layers(module: nn.Module) -> list[nn.LSTM]:
    """The layers of its LSTM, each as a module of its own that plain hooks can be put on."""
    whole, alone = module.lstm, []
    for i in range(whole.num_layers):
        width = whole.input_size if i == 0 else 2 * whole.hidden_size
        layer = nn.LSTM(width, whole.hidden_size, batch_first=True, bidirectional=True)
        for name, _ in list(layer.named_parameters()):
            getattr(layer, name).data = getattr(whole, name.replace("_l0", f"_l{i}")).data
        alone.append(layer.requires_grad_(False))
    return alone
