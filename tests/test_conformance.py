"""The recipes and coders that ship, held to the conformance suite."""

from kvcellar.recipe import EXACT, TURBO
from kvcellar.stages import SymbolCoder
from kvcellar.symbols.byteplanes import BytePlanes
from kvcellar.symbols.mapcoder import MapCoder
from kvcellar.testing.stages import RecipeConformance, SymbolCoderConformance


class TestExact(RecipeConformance):
    recipe = EXACT


class TestBytePlanes(SymbolCoderConformance):
    def coder(self) -> SymbolCoder:
        return BytePlanes()


class TestTurbo4(RecipeConformance):
    recipe = TURBO[0]


class TestTurbo2(RecipeConformance):
    recipe = TURBO[2]


class TestMapCoder(SymbolCoderConformance):
    dtypes = ("uint8", "uint16", "uint32")

    def coder(self) -> SymbolCoder:
        return MapCoder()
