// FBGEMM's kernels: a baseline on rows without checksums, and a verified kernel on rows with them.
#include "embedding_bag/batch.h"

#if __has_include(<fbgemm/FbgemmEmbedding.h>)
#include <fbgemm/FbgemmEmbedding.h>

#include <map>
#include <mutex>
#include <tuple>

namespace holdfast {

namespace {

template <typename Index>
using Generated =
    typename fbgemm::EmbeddingSpMDMKernelSignature<uint8_t, Index, int64_t, float>::Type;

template <typename Index>
Generated<Index> generate(const RowTable& t, const Pooling& p) {
  const bool weighted = p.weights != nullptr;
  const int prefetch = p.prefetch ? int{kAhead} : 0;
  if (t.kind == RowKind::u8) {
    return fbgemm::GenerateEmbeddingSpMDMWithStrides<uint8_t, Index, int64_t, float>(
        t.dim, weighted, p.mean, prefetch, false, true, t.dim, t.stride);
  }
  return fbgemm::GenerateEmbeddingSpMDMNBitWithStrides<Index, int64_t, float>(
      4, t.dim, weighted, p.mean, prefetch, false, true, t.dim, t.stride);
}

template <typename Index>
const Generated<Index>& kernel(const RowTable& t, const Pooling& p) {
  using Key = std::tuple<int, int64_t, int64_t, bool, bool, bool>;
  static std::mutex mutex;
  static std::map<Key, Generated<Index>> kernels;
  const bool weighted = p.weights != nullptr;
  const Key key{static_cast<int>(t.kind), t.dim, t.stride, weighted, p.mean, p.prefetch};
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = kernels.find(key);
  if (found == kernels.end()) found = kernels.emplace(key, generate<Index>(t, p)).first;
  return found->second;
}

template <typename Index>
FbgemmPool pool_with(const RowTable& t, const Pooling& p) {
  const Generated<Index>& found = kernel<Index>(t, p);  // it is never erased
  return [&found, t, p](const int64_t* offsets, int64_t bags, int64_t count, float* out) {
    const int64_t first = offsets[0];
    const auto* indices = static_cast<const Index*>(p.indices) + first;
    const float* weights = p.weights ? p.weights + first : nullptr;
    return found(bags, count, t.rows, t.data, indices, offsets, weights, out);
  };
}

}  // namespace

bool fbgemm_available() { return true; }

FbgemmPool fbgemm_pool(const RowTable& t, const Pooling& p) {
  return p.wide ? pool_with<int64_t>(t, p) : pool_with<int32_t>(t, p);
}

}  // namespace holdfast

#else

namespace holdfast {
bool fbgemm_available() { return false; }
FbgemmPool fbgemm_pool(const RowTable&, const Pooling&) { return {}; }
}  // namespace holdfast

#endif
