// The Python functions that the core calls when it finds a fault or reaches a place where a fault
// may be injected.
#pragma once

#include <c10/util/Exception.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "core/interception_state.h"
#include "core/product.h"
#include "core/stages.h"

namespace holdfast {

// A function that is set at run time and may be called from any thread. While it runs, the calling
// thread's products are not intercepted. Instances are never destroyed, because Python callables
// must not be released after the interpreter has ended.
template <typename... Args>
class Callback {
 public:
  using Function = std::function<void(Args...)>;

  void set(Function function) {
    const bool given = static_cast<bool>(function);
    const std::lock_guard<std::mutex> lock(mutex_);
    function_ = given ? std::make_shared<const Function>(std::move(function)) : nullptr;
    set_.store(given);
  }

  bool is_set() const { return set_.load(std::memory_order_relaxed); }

  // Returns whether there was a function to call.
  bool call_if_set(Args... args) const {
    std::shared_ptr<const Function> function;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      function = function_;
    }
    if (function == nullptr) return false;
    const Bypass bypass;
    (*function)(args...);
    return true;
  }

  void operator()(Args... args) const {
    TORCH_CHECK(call_if_set(args...), "holdfast: a fault was seen but no handler is installed");
  }

 private:
  mutable std::mutex mutex_;  // guards function_
  std::shared_ptr<const Function> function_;
  std::atomic<bool> set_{false};
};

// All that the Python code needs to decide about the suspect rows of a product.
struct Suspicion {
  SiteKey key;
  const Problem& problem;
  const at::Tensor& output;
  const Encoding& encoding;
  const at::Tensor& rows;  // What count_suspects() or verify() found.
  bool kept;  // The encoding was made by an earlier operation.
  // Computes the product again by its own kernel, with its addend or with another one.
  std::function<at::Tensor(const std::optional<at::Tensor>&)> compute;
};

inline auto& on_suspect = *new Callback<const Suspicion&>;
// Called when a kept encoding has changed in memory.
inline auto& on_damaged_encoding = *new Callback<const SiteKey&>;
// Called with the message of an error inside a check, after which the product is unverified.
inline auto& on_failed_check = *new Callback<const SiteKey&, const std::string&>;

// Writes the tolerance of each row of a product to an fp64 [batch, M] tensor. It is set while
// another threshold than `rounding` is in force.
inline auto& row_tolerances = *new Callback<const Problem&, const Encoding&, const at::Tensor&>;

// The fault injector's hook, which is called at every stage. `output` is undefined until the
// product has been computed.
inline auto& site_hook = *new Callback<
    Stage, const SiteKey&, const Problem&, const Encoding&, const at::Tensor& /*output*/>;
inline bool armed() { return site_hook.is_set(); }
inline void visit(
    Stage stage, const SiteKey& key, const Problem& p, const Encoding& e,
    const at::Tensor& output) {
  if (armed()) site_hook.call_if_set(stage, key, p, e, output);
}

}  // namespace holdfast
