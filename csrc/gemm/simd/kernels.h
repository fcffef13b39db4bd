// The passes of gemm/mask_passes.h, compiled once for each instruction set (core/simd/vectors.h).
// GCC vectorizes their loops.

// The sum of a product and its mask must stay two roundings in every instruction set.
#pragma GCC optimize("fp-contract=off")

#include "core/simd/vectors.h"
#include "gemm/mask_passes.h"

namespace holdfast {
namespace {

// The elements of a format as integers.
template <Element E>
struct Format;
template <>
struct Format<Element::f64> {
  typedef int64_t Bits;
  static constexpr Bits infinity = 0x7ff0000000000000;
  static double value(Bits x) { return __builtin_bit_cast(double, x); }
};
template <>
struct Format<Element::f32> {
  typedef int32_t Bits;
  static constexpr Bits infinity = 0x7f800000;
  static double value(Bits x) { return __builtin_bit_cast(float, x); }
};
template <>
struct Format<Element::f16> {
  typedef int16_t Bits;
  static constexpr Bits infinity = 0x7c00;
  static double value(Bits x) { return half_value(static_cast<uint16_t>(x)); }
};
template <>
struct Format<Element::bf16> {
  typedef int16_t Bits;
  static constexpr Bits infinity = 0x7f80;
  static double value(Bits x) {
    return __builtin_bit_cast(float, uint32_t{static_cast<uint16_t>(x)} << 16);
  }
};

template <typename Bits>
constexpr Bits kSign = static_cast<Bits>(uint64_t{1} << (8 * sizeof(Bits) - 1));
template <typename Bits>
constexpr Bits kMagnitude = static_cast<Bits>(~kSign<Bits>);

template <Element E>
void magnitudes(const void* addend, int64_t count, Magnitudes& of) {
  typedef typename Format<E>::Bits Bits;
  const auto* data = static_cast<const Bits*>(addend);
  Bits most = 0, least = kMagnitude<Bits>, infinite = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Bits size = data[i] & kMagnitude<Bits>;
    const Bits is_infinite = size == Format<E>::infinity ? -1 : 0;
    const Bits finite = size & ~is_infinite;
    most = finite > most ? finite : most;
    least = finite < least ? finite : least;
    infinite |= is_infinite;
  }
  if (most > of.most) of.most = most;
  if (least < of.least) of.least = least;
  of.infinite |= infinite != 0;
}

template <Element E>
void unmask(const void* addend, int64_t count, int64_t least, void* to) {
  typedef typename Format<E>::Bits Bits;
  const auto* data = static_cast<const Bits*>(addend);
  auto* out = static_cast<Bits*>(to);
  const Bits first = static_cast<Bits>(least);
  for (int64_t i = 0; i < count; ++i) {
    const Bits x = data[i], size = x & kMagnitude<Bits>;
    out[i] = size >= first && size <= Format<E>::infinity ? Bits{0} : x;
  }
}

template <Element E>
bool contradicts(
    const Masking& m, const void* of_c, const void* unmasked, const void* of_addend,
    int64_t count) {
  typedef typename Format<E>::Bits Bits;
  const auto* c = static_cast<const Bits*>(of_c);
  const auto* plain = static_cast<const Bits*>(unmasked);
  const auto* addend = static_cast<const Bits*>(of_addend);
  const Bits least = static_cast<Bits>(m.least), sign = m.beta < 0 ? kSign<Bits> : Bits{0};
  Bits differs = 0, finite = 0;
  for (int64_t j = 0; j < count; ++j) {
    const Bits size = addend[j] & kMagnitude<Bits>, infinite = addend[j] ^ sign;
    const Bits expected = size == Format<E>::infinity ? infinite : plain[j];
    const Bits masks = size >= least && size < Format<E>::infinity ? -1 : 0;
    differs |= (c[j] ^ expected) & ~masks;
    finite |= masks;
  }
  if (differs != 0 || finite == 0) return differs != 0;
  const double relative = m.steps * m.eps;  // The largest fp64 times `steps` would be INF.
  int64_t wrong = 0;
  for (int64_t j = 0; j < count; ++j) {
    const Bits size = addend[j] & kMagnitude<Bits>;
    const bool masks = size >= least && size < Format<E>::infinity;
    const double product = Format<E>::value(plain[j]), mask = Format<E>::value(addend[j]) * m.beta;
    const double error = __builtin_fabs(Format<E>::value(c[j]) - product - mask);
    const double most = __builtin_fabs(mask) * relative + __builtin_fabs(product) * 2 * m.eps;
    wrong += masks && !(error <= most) ? 1 : 0;
  }
  return wrong != 0;
}

template <typename Body>
auto by_format(Element element, const Body& body) {
  switch (element) {
    case Element::f64: return body.template operator()<Element::f64>();
    case Element::f32: return body.template operator()<Element::f32>();
    case Element::f16: return body.template operator()<Element::f16>();
    default: return body.template operator()<Element::bf16>();
  }
}

void magnitudes(Element element, const void* addend, int64_t count, Magnitudes& of) {
  by_format(element, [&]<Element E>() { magnitudes<E>(addend, count, of); });
}

void unmask(Element element, const void* addend, int64_t count, int64_t least, void* to) {
  by_format(element, [&]<Element E>() { unmask<E>(addend, count, least, to); });
}

bool contradicts(
    const Masking& m, const void* c, const void* unmasked, const void* addend, int64_t count) {
  return by_format(
      m.element, [&]<Element E>() { return contradicts<E>(m, c, unmasked, addend, count); });
}

}  // namespace

const MaskPasses HOLDFAST_OF_SET(mask_passes){&magnitudes, &unmask, &contradicts, HOLDFAST_NAME};

}  // namespace holdfast
