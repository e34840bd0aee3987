"""The recipes and coders that ship, held to the conformance suite."""

from kvcellar.recipe import EXACT
from kvcellar.stages import SymbolCoder
from kvcellar.symbols.byteplanes import BytePlanes
from kvcellar.testing.stages import RecipeConformance, SymbolCoderConformance


class TestExact(RecipeConformance):
    recipe = EXACT


class TestBytePlanes(SymbolCoderConformance):
    def coder(self) -> SymbolCoder:
        return BytePlanes()
