"""`causal/1` decoded by plain Python integers, written from docs/format.md §7a and nothing else."""

from __future__ import annotations

from decimal import Decimal, getcontext

import numpy as np

getcontext().prec = 50
PI = Decimal("3.14159265358979323846264338327950288419716939937510")
ALL = (1 << 24) + (1 << 16)
E = [int((Decimal(2) ** (15 - Decimal(i) / 64)).to_integral_value()) for i in range(64)]
G = [int((64 * (1 + Decimal(i) / 64).ln() / Decimal(2).ln()).to_integral_value()) for i in range(64)]
MIX = ((Decimal("0.62"), Decimal("0.84")), (Decimal("0.38"), Decimal("1.18")))


def _phi(z: Decimal) -> Decimal:
    return sum((a / (1 + (-PI * z / (Decimal(3).sqrt() * b)).exp()) for a, b in MIX), Decimal(0))


F = [int((_phi(Decimal(i) / 32 - 16) * (1 << 24)).to_integral_value()) for i in range(1025)]
F[0], F[1024] = 0, 1 << 24


def limit(x: int, most: int) -> int:
    return max(-most, min(most, x))


def logarithm(x: int) -> int:
    e = x.bit_length() - 1
    return 64 * e + G[(64 * x >> e) - 64]


def sine(phase: int) -> int:
    """From an angle in 2⁻⁶⁴ circles; float sines, rounded, since those of 4096 entries are far from a half."""
    i, r = phase >> 52, phase >> 40 & 4095
    low, high = (round(2**14 * np.sin(2 * np.pi * (i + k) / 4096).item()) for k in (0, 1))
    return low + ((high - low) * r >> 12)


class Layer:
    """Decodes one layer. `shallow` are the sums' shallow terms for each token and number, whole numbers."""

    def __init__(self, form: tuple[int, int, int], spread: list[int], unit: list[int], within: list[list[int]]):
        self.form, self.spread, self.unit, self.within = form, spread, unit, within

    def fixed(self, q: int, c: int) -> int:
        m, b, _ = self.form
        e, f = q >> m + 1, q & (1 << m + 1) - 1
        if e:
            f |= 1 << m + 1
        s = max(e, 1) + 20 - self.unit[c] - b - m - 1
        return min(f << s if 0 <= s <= 99 else f << 99 if s > 0 else f >> -s, 1 << 40)

    def edge(self, n: int, c: int) -> int:
        half = self.form[2]
        if n > 32768:
            return self.fixed(2 * (n - 32768) - half, c)
        return 0 if n == 32768 else -self.fixed(2 * (32767 - n) + 2 - half, c)

    def number(self, mu: int, loud: int, c: int) -> tuple[int, int, int]:
        """Pattern, value and distance of the next number of the stream."""
        mu, loud = limit(mu, 1 << 40), max(0, min(loud, 2176))
        by = 5 + loud // 64

        def below(n: int) -> int:
            if n in (0, 65536):
                return ALL if n else 0
            z = max(0, min(((self.edge(n, c) - mu) * E[loud % 64] >> by) + 16384, 32767))
            return F[z >> 5] + ((F[(z >> 5) + 1] - F[z >> 5]) * (z % 32) >> 5) + n

        each = self.width // ALL
        wanted = self.low // each
        n = 0
        for step in (1 << k for k in range(15, -1, -1)):
            n += step if below(n + step) <= wanted else 0
        self.low -= each * below(n)
        self.width = each * (below(n + 1) - below(n))
        while self.width < 1 << 48:
            self.low, self.width = self.low * 256 + next(self.bytes, 0), self.width * 256
        magnitude, negative = (n - 32768, False) if n >= 32768 else (32767 - n, True)
        value = self.fixed(2 * magnitude + 1 - self.form[2], c) * (-1 if negative else 1)
        away = min(abs((value - mu) * E[loud % 64] >> by), 4096)
        return magnitude | negative << 15, value, away

    def decode(
        self,
        data: bytes,
        shallow: list[list[int]],
        pairs: int,
        turns: list[int],
        positions: list[int],
        token: list[int],
    ) -> list[list[int]]:
        """Patterns of each token in coding order; `token` is followed."""
        self.bytes, self.low, self.width = iter(data), 0, 1 << 56
        for _ in range(7):
            self.low = self.low * 256 + next(self.bytes, 0)
        count = len(self.spread)
        self.channel, drift = [0] * count, [0] * count
        found = []
        for t, sums in enumerate(shallow):
            seen, row = [], []

            def plain(c: int, seen: list[int] = seen, sums: list[int] = sums) -> int:
                return sums[c] + sum(self.within[c][k] * x for k, x in enumerate(seen)) >> 10

            def follow(c: int, away: int, t: int = t) -> None:
                h = (1313 * away >> 10) - 1024
                self.channel[c] = limit(self.channel[c] + (384 * h >> 10), 6 << 14)
                token[t] = limit(token[t] + (640 * h >> 10), 6 << 14)

            def drifted(c: int, missed: int) -> None:
                drift[c] += limit(missed, 1 << 26) - drift[c] >> 5

            c = 0
            while c < count:
                if c < 2 * pairs:
                    phase = positions[t] * turns[c // 2 % len(turns)] % (1 << 64)
                    sin, cos = sine(phase), sine((phase + (1 << 62)) % (1 << 64))
                    a0 = plain(c)
                    mu_a = limit(a0 + (96 * drift[c] >> 8), 1 << 40)
                    mu_b = limit(plain(c + 1) + (96 * drift[c + 1] >> 8), 1 << 40)
                    beta = limit(self.within[c + 1][c] >> 2, 1 << 19)
                    mu_b = limit(mu_b + (limit(mu_a, 1 << 37) * beta >> 16), 1 << 40)
                    va, ve = (self.variance(self.spread[k]) for k in (c, c + 1))
                    g = limit(beta, 1 << 17) >> 6
                    k, s0, c0 = va * g >> 10, sin >> 4, cos >> 4
                    vb = ve + (k * g >> 10)
                    w = max(1, c0 * c0 * va - 2 * c0 * s0 * k + s0 * s0 * vb >> 20)
                    first = logarithm(w) + 640 >> 1
                    mu = cos * mu_a - sin * mu_b >> 14
                    p, ra, away = self.number(mu, first + (token[t] + self.channel[c] >> 8), c)
                    row.append(p)
                    follow(c, away)
                    rho = limit(((c0 * s0 * (va - vb) + (c0 * c0 - s0 * s0) * k >> 20) << 12) // w, 1 << 15)
                    mu = (sin * mu_a + cos * mu_b >> 14) + (limit(ra - mu, 1 << 40) * rho >> 12)
                    loud = self.spread[c] + self.spread[c + 1] - first + (token[t] + self.channel[c + 1] >> 8)
                    p, rb, away = self.number(mu, loud, c + 1)
                    row.append(p)
                    follow(c + 1, away)
                    a, b = ra * cos + rb * sin >> 14, rb * cos - ra * sin >> 14
                    drifted(c, a - a0)
                    seen.append(limit(a >> 8, 1 << 17))
                    drifted(c + 1, b - plain(c + 1))
                    seen.append(limit(b >> 8, 1 << 17))
                    c += 2
                    continue
                there = plain(c)
                loud = self.spread[c] + (token[t] + self.channel[c] >> 8)
                p, value, away = self.number(there + (96 * drift[c] >> 8), loud, c)
                row.append(p)
                follow(c, away)
                drifted(c, value - there)
                seen.append(limit(value >> 8, 1 << 17))
                c += 1
            found.append(row)
        return found

    @staticmethod
    def variance(spread: int) -> int:
        e = 2 * spread - 640
        whole, part = divmod(e, 64)
        up = 2 * E[64 - part] if part else E[0]
        return min(max(1, up << whole - 15 if whole >= 15 else up >> min(15 - whole, 62)), 1 << 34)
