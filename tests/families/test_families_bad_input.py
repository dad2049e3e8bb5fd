"""No public function of a family goes without tests of bad input."""

from tests.moe.test_moe_bad_input import GOOD as MOE
from tests.moe.test_moe_grouped_dense_bad_input import GOOD as GROUPED_DENSE
from tests.mxfp8.test_mxfp8_bad_input import GOOD as MXFP8
from tests.quantize.test_quantize_bad_input import GOOD as QUANTIZE
from tests.quantized_gmm.test_quantized_gmm_bad_input import GOOD as QUANTIZED_GMM
from tests.support.functions import public


def test_everything_public_is_tested():
    """A function that a package has and these lists have not would be refused nothing."""
    goldens, helpers = public("cpu_golden"), {"expand", "mxfp8_values"}
    tested = {*MOE, *GROUPED_DENSE, *MXFP8, *QUANTIZE, *QUANTIZED_GMM}
    homes = {goldens[function].__module__ for function in tested}
    of_homes = {name for name, value in goldens.items() if value.__module__ in homes}
    assert {name for name in of_homes - helpers if not name.endswith("_definition")} == tested
