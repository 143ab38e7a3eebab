// Products with quantized weights, for models in fp32 and bf16.
#include "linear/quantized_linear.h"

#include <memory>

#include "linear/linear.h"

namespace promptq {

template <typename T>
std::unique_ptr<Packed<T>> pack_quantized(const Matrix& weight, WeightMemory& memory) {
  if (weight.bits == 4) return std::make_unique<QuantizedLinear<T, 4>>(weight, memory);
  return std::make_unique<QuantizedLinear<T, 8>>(weight, memory);
}

template std::unique_ptr<Packed<float>> pack_quantized(const Matrix&, WeightMemory&);
template std::unique_ptr<Packed<Bf16>> pack_quantized(const Matrix&, WeightMemory&);

}  // namespace promptq
