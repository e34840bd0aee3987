"""docs/entropy.md word by word, in Python's own integers: what the compiled walk of `adaptive/1` is held against."""

from __future__ import annotations

import math

from kvcellar.symbols.adaptivetables import Tables
from kvcellar.symbols.binarycoder import SQUASH, STRETCH


class PlainCoder:
    """Encodes one array from `tables` on."""

    def __init__(self, tables: Tables):
        self.static, self.mean = tables.static.tolist(), tables.mean.tolist()
        self.probability, self.weights = tables.table.tolist(), tables.weights.tolist()
        self.rate = 7
        self.low, self.width, self.shifts, self.bits = 0, 1 << 40, 0, 0.0

    def encode(self, rows: list[list[int]], notes: list[int]) -> tuple[bytes, float]:
        """The stream, and how many bits it would take if the coder wasted nothing."""
        columns = len(self.mean)
        self.fast, self.slow = [0] * columns, [0] * columns
        before = [0] * columns
        for row, note in zip(rows, notes, strict=True):
            self._row(row, before, note)
            for c, v in enumerate(row):
                v = 256 * max(-40, min(40, v))
                self.fast[c] += (v - self.fast[c]) // 2
                self.slow[c] += (v - self.slow[c]) // 16
            before = row
        top = -(-self.low // (1 << 32))  # the code so far is a number of 40 + 8·shifts bits
        return top.to_bytes(self.shifts + 1, "big"), self.bits

    def _row(self, row: list[int], before: list[int], note: int) -> None:
        near = near_expected = total = total_expected = 0
        for c, v in enumerate(row):
            level = (self.mean[c] ** 2).bit_length() - 1
            local_ratio = (near + 64) * (2**20 // (near_expected + 64)) // 2**16
            total_ratio = (total + 256) * (2**32 // (total_expected + 256)) // 2**28
            nearby = sum(local_ratio > edge for edge in (4, 8, 12, 17, 24, 36, 56))
            whole = sum(total_ratio > edge for edge in (8, 11, 13, 16, 19, 23, 30))
            fast = self._signed(self.fast[c], (6, 16, 32, 56, 96, 160, 288))
            slow = self._signed(self.slow[c], (4, 10, 20, 40, 72, 128, 224))
            swift, trend = abs(fast - 8), abs(slow - 8)
            mix = 4 * note + level // 8
            size = abs(v)
            for count in range(15):
                kind = min(count, 3)
                energy = ((kind * 32 + level) * 8 + nearby) * 8 + whole
                places = [energy, 8192 + ((kind * 32 + level) * 8 + swift) * 8 + trend]
                self._mixed(kind * 32 + mix, self.static[min(count, 1)][c], places, 256, int(size > count))
                if size == count:
                    break
                if count == 0:
                    last = max(-2, min(2, before[c])) + 2
                    places = [16384 + (last * 16 + fast) * 16 + slow, 17664 + slow * 32 + level]
                    self._mixed(128 + mix, 0, places, 0, int(v < 0))
                    swift = max((8 - fast) if v < 0 else (fast - 8), 0)
                    trend = max((8 - slow) if v < 0 else (slow - 8), 0)
            if size > 14:
                rest = size - 14
                length = rest.bit_length() - 1
                for exponent in range(min(length + 1, 31)):
                    at, bit = 18176 + level * 32 + exponent, int(exponent < length)
                    self._bit(max(32, min(65504, self.probability[at])), bit)
                    self._adapt(at, bit, 5)
                for shift in reversed(range(length)):
                    self._bit(32768, rest >> shift & 1)
            heard = 256 * min(size, 40)
            near += heard - near // 8
            near_expected += self.mean[c] - near_expected // 8
            total += heard
            total_expected += self.mean[c]

    @staticmethod
    def _signed(mean: int, edges: tuple[int, ...]) -> int:
        q = sum(abs(mean) > edge for edge in edges)
        return 8 + q if mean >= 0 else 8 - q

    def _mixed(self, row: int, first: int, places: list[int], last: int, bit: int) -> None:
        inputs = [first, *(int(STRETCH[self.probability[at] // 16]) for at in places), last]
        total = sum(w * x for w, x in zip(self.weights[row], inputs, strict=True)) // 65536
        p = int(SQUASH[max(-2047, min(2047, total)) + 2048])
        self._bit(p, bit)
        for i, x in enumerate(inputs):
            w = self.weights[row][i] + (2 * x * (65536 * bit - p) + 2**17) // 2**18
            self.weights[row][i] = max(-(2**20), min(2**20, w))
        for at in places:
            self._adapt(at, bit, self.rate)

    def _adapt(self, at: int, bit: int, rate: int) -> None:
        self.probability[at] += (65535 * bit - self.probability[at]) // 2**rate

    def _bit(self, p: int, bit: int) -> None:
        self.bits -= math.log2(p / 65536 if bit else 1 - p / 65536)
        bound = (self.width >> 16) * p
        if bit:
            self.width = bound
        else:
            self.low, self.width = self.low + bound, self.width - bound
        while self.width < 1 << 32:
            self.low, self.width, self.shifts = self.low << 8, self.width << 8, self.shifts + 1
