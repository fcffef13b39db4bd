// The functions, written in Python, that the core calls: when it finds a fault, and at fault sites.
#pragma once

#include <c10/util/Exception.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "core/interception_state.h"
#include "core/product.h"
#include "core/stages.h"

namespace holdfast {

// A function that is set at run time and called from any thread, with the interception of this
// thread's products off. Instances are never destroyed: Python callables must not be released after
// the interpreter is gone.
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

  // Whether there was a function to call.
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

// Everything the slow path in Python needs to decide on suspect rows.
struct Suspicion {
  SiteKey key;
  const Problem& problem;
  const at::Tensor& output;
  const Encoding& encoding;
  const at::Tensor& rows;  // what verify() says of them
  bool kept;  // the encoding was made before this op
  std::function<at::Tensor()> rerun;
};

inline auto& on_suspect = *new Callback<const Suspicion&>;
inline auto& on_damaged_encoding = *new Callback<const SiteKey&>;  // a kept one has changed

// The hook of the fault injector, called at every stage; `output` is undefined before the product
// is computed.
inline auto& site_hook = *new Callback<
    Stage, const SiteKey&, const Problem&, const Encoding&, const at::Tensor& /*output*/>;
inline bool armed() { return site_hook.is_set(); }
inline void visit(
    Stage stage, const SiteKey& key, const Problem& p, const Encoding& e,
    const at::Tensor& output) {
  if (armed()) site_hook.call_if_set(stage, key, p, e, output);
}

}  // namespace holdfast
