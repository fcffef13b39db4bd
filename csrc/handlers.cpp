#include "handlers.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

namespace holdfast {

namespace {

thread_local int thread_depth = 0;
thread_local int thread_bypass = 0;

std::atomic<int> process_depth{0};
std::atomic<bool> hooked{false};

// Never destroyed: Python callables must not be released after the interpreter is gone.
struct Shared {
  std::mutex mutex;  // guards everything below
  SuspectHandler suspect_handler;
  DamageHandler damage_handler;
  AttentionHandler attention_handler;
  std::shared_ptr<SiteHook> site_hook;
};
Shared& shared = *new Shared;

template <typename Handler>
Handler installed(Handler Shared::* which) {
  const std::lock_guard<std::mutex> lock(shared.mutex);
  TORCH_CHECK(shared.*which, "holdfast: a fault was seen but no handler is installed");
  return shared.*which;
}

}  // namespace

bool verifying() { return process_depth.load(std::memory_order_relaxed) > 0 || thread_depth > 0; }

bool armed() { return hooked.load(std::memory_order_relaxed); }

bool intercepting() { return (verifying() || armed()) && thread_bypass == 0; }

void note_uncovered(Op op) {
  if (intercepting()) count_unverified(current_site(op), "no checksum for this op yet");
}

void set_handlers(SuspectHandler suspect, DamageHandler damage) {
  const std::lock_guard<std::mutex> lock(shared.mutex);
  shared.suspect_handler = std::move(suspect);
  shared.damage_handler = std::move(damage);
}

void set_attention_handler(AttentionHandler handler) {
  const std::lock_guard<std::mutex> lock(shared.mutex);
  shared.attention_handler = std::move(handler);
}

void arm(SiteHook hook) {
  const bool on = static_cast<bool>(hook);
  const std::lock_guard<std::mutex> lock(shared.mutex);
  shared.site_hook = on ? std::make_shared<SiteHook>(std::move(hook)) : nullptr;
  hooked.store(on);
}

void report(const Suspicion& suspicion) {
  const Bypass bypass;
  const auto handler = installed(&Shared::suspect_handler);
  handler(suspicion);
}

void report_damage(const SiteKey& key) {
  const Bypass bypass;
  const auto handler = installed(&Shared::damage_handler);
  handler(key);
}

void report(const SiteKey& key, const AttentionReport& found, const at::Tensor& output) {
  const Bypass bypass;
  const auto handler = installed(&Shared::attention_handler);
  handler(key, found, output);
}

void visit(
    Stage stage, const SiteKey& key, const Problem& p, const Encoding& e, const at::Tensor& out) {
  if (!armed()) return;
  std::shared_ptr<SiteHook> hook;
  {
    const std::lock_guard<std::mutex> lock(shared.mutex);
    hook = shared.site_hook;
  }
  if (hook == nullptr) return;
  const Bypass bypass;
  (*hook)(stage, key, p, e, out);
}

void change_process_depth(int delta) { process_depth.fetch_add(delta); }
void change_thread_depth(int delta) { thread_depth += delta; }
void change_thread_bypass(int delta) { thread_bypass += delta; }

Bypass::Bypass() { ++thread_bypass; }
Bypass::~Bypass() { --thread_bypass; }

}  // namespace holdfast
