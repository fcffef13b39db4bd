// Interception of torch's own GEMM kernels on CPU: naming, encoding, injection sites, verification.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "verify.h"

namespace holdfast {

enum class Op : uint8_t { mm, addmm, bmm, baddbmm, addmv, dot, addmm_activation, sdpa, sdpa_backward };
const char* op_name(Op op);
bool covered(Op op);

enum class Role : uint8_t { forward, grad_a, grad_b };

// Which matmul of the program: module (0: outside any), op, how many-eth of its kind in the
// module, and whether it computes the output or a gradient.
struct SiteKey {
  uint32_t module = 0;
  Op op = Op::mm;
  uint16_t ordinal = 0;
  Role role = Role::forward;
  uint64_t packed() const {
    return uint64_t{module} << 32 | uint64_t{static_cast<uint8_t>(op)} << 24 |
        uint64_t{ordinal} << 8 | static_cast<uint8_t>(role);
  }
};

struct SiteCounters {
  SiteKey key;
  int64_t calls = 0, rows = 0, suspects = 0, unverified = 0;
  double line = 0;  // mean threshold / rms of the rows of the latest clean call
  std::string reason;  // why calls were not verified
};

enum class Stage : int { checksum, operand, output };

// Everything the slow path in Python needs to decide on suspect rows.
struct Suspicion {
  SiteKey key;
  const Problem& problem;
  const at::Tensor& output;
  const Encoding& encoding;
  const Verdict& verdict;
  bool cached;
  std::function<at::Tensor()> rerun;
};

using SuspectHandler = std::function<void(const Suspicion&)>;
using SiteHook =
    std::function<void(Stage, const SiteKey&, const Problem&, const Encoding&, const at::Tensor&)>;

void set_suspect_handler(SuspectHandler handler);
void arm(SiteHook hook);  // an empty hook disarms

// Verification is on while any of these is positive: process-wide count, or this thread's.
void change_process_depth(int delta);
void change_thread_depth(int delta);

void push_module(uint32_t module);
void pop_module(uint32_t module);
void clear_modules();

void watch(const std::vector<at::Tensor>& weights);
void unwatch(const std::vector<at::Tensor>& weights);
void forget(const at::Tensor& weight);
int64_t cached_encodings();

std::vector<SiteCounters> counters();
void reset_counters();

// Turns interception off on this thread while alive (slow path, hooks).
class Bypass {
 public:
  Bypass();
  ~Bypass();
};

void install();  // registers the kernels with the dispatcher, once

}  // namespace holdfast
