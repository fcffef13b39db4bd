// What dropout keeps, drawn as torch's bernoulli_ draws it.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <mutex>

#include "attention/attention.h"
#include "attention/passes.h"

namespace holdfast {

namespace {

constexpr int64_t kWords = at::MERSENNE_STATE_N;

// Takes two numbers of a generator for each element, as torch's own loop does. They are a fraction
// of 53 bits, and the element is kept if it is below `keep`.
void draw(at::mt19937_data_pod& generator, double keep, uint8_t* kept, int64_t count) {
  const AttentionPasses& passes = attention_passes();
  const auto limit = static_cast<uint64_t>(std::ceil(std::ldexp(keep, 53)));
  uint32_t words[kWords + 1];
  int64_t carried = 0;  // 1 if the first number of an element is the last one of a block
  while (count > 0) {
    if (generator.left_ == 1) {
      passes.advance(generator.state_.data());
      generator.left_ = kWords + 1;
      generator.next_ = 0;
    }
    const int64_t some = std::min<int64_t>(generator.left_ - 1, 2 * count - carried);
    passes.temper(generator.state_.data() + generator.next_, some, words + carried);
    generator.next_ += static_cast<uint32_t>(some);
    generator.left_ -= static_cast<int>(some);
    const int64_t pairs = (carried + some) / 2;
    passes.below(words, pairs, limit, kept);
    carried = (carried + some) % 2;
    words[0] = words[2 * pairs];
    kept += pairs;
    count -= pairs;
  }
}

void draw(at::CPUGeneratorImpl& generator, double keep, const at::Tensor& kept) {
  const std::lock_guard<std::mutex> lock(generator.mutex_);
  at::mt19937 engine = generator.engine();
  at::mt19937_data_pod state = engine.data();
  draw(state, keep, static_cast<uint8_t*>(kept.data_ptr()), kept.numel());
  engine.set_data(state);
  generator.set_engine(engine);
}

// Returns true if torch takes the same numbers. Builds with MKL take others on some processors.
bool draws_alike() {
  const auto same = [] {
    constexpr uint64_t kSeed = 2147483647;
    const int64_t count = 3 * kWords + 1;
    at::Generator torchs = at::detail::createCPUGenerator(kSeed);
    at::Generator ours = at::detail::createCPUGenerator(kSeed);
    for (auto* each : {&torchs, &ours}) each->get<at::CPUGeneratorImpl>()->random();
    const at::Tensor expected = at::empty({count}, at::kBool).bernoulli_(0.7, torchs);
    const at::Tensor found = at::empty({count}, at::kBool);
    draw(*ours.get<at::CPUGeneratorImpl>(), 0.7, found);
    return expected.equal(found) && torchs.get_state().equal(ours.get_state());
  };
  static const bool alike = same();
  return alike;
}

}  // namespace

at::Tensor draw_kept(at::IntArrayRef sizes, double dropout, at::ScalarType scores) {
  if (draws_alike()) {
    const at::Tensor kept = at::empty(sizes, at::kBool);
    const at::Generator& generator = at::detail::getDefaultCPUGenerator();
    draw(*generator.get<at::CPUGeneratorImpl>(), 1 - dropout, kept);
    return kept;
  }
  const auto type = scores == at::kDouble ? at::kDouble : at::kBool;
  return at::empty(sizes, type).bernoulli_(1 - dropout).to(at::kBool);
}

}  // namespace holdfast
