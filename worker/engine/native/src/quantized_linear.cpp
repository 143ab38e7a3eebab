// Products with quantized weights, for models in fp32 and bf16.
#include "linear/quantized_linear.h"

#include <memory>
#include <type_traits>

#include "linear/linear.h"

namespace promptq {

template <typename T>
std::unique_ptr<Packed<T>> pack_quantized(const Matrix& weight, WeightMemory& memory) {
  const auto of_bits = [&]<int Bits>(std::integral_constant<int, Bits>) -> std::unique_ptr<Packed<T>> {
    if (weight.offsets) return std::make_unique<QuantizedLinear<T, Bits, true>>(weight, memory);
    return std::make_unique<QuantizedLinear<T, Bits, false>>(weight, memory);
  };
  if (weight.bits == 4) return of_bits(std::integral_constant<int, 4>());
  return of_bits(std::integral_constant<int, 8>());
}

template std::unique_ptr<Packed<float>> pack_quantized(const Matrix&, WeightMemory&);
template std::unique_ptr<Packed<Bf16>> pack_quantized(const Matrix&, WeightMemory&);

}  // namespace promptq
