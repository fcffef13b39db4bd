#include "core/interception_state.h"

#include <atomic>

#include "core/callbacks.h"

namespace holdfast {

namespace {

thread_local int thread_depth = 0;
thread_local int thread_bypass = 0;
thread_local int thread_compiled = 0;
std::atomic<int> process_depth{0};

}  // namespace

void change_process_depth(int delta) { process_depth.fetch_add(delta); }
void change_thread_depth(int delta) { thread_depth += delta; }
void change_thread_bypass(int delta) { thread_bypass += delta; }

void change_thread_compiled(int delta) { thread_compiled += delta; }

bool in_compiled_code() { return thread_compiled > 0; }

bool verifying() { return process_depth.load(std::memory_order_relaxed) > 0 || thread_depth > 0; }

bool intercepting() { return (verifying() || armed()) && thread_bypass == 0; }

void note_uncovered(Op op) {
  if (intercepting()) count_unverified(current_site(op), "no checksum for this op yet");
}

}  // namespace holdfast
