// Interception of torch's own GEMM kernels on CPU: encoding, fault sites, verification.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "sites.h"
#include "verify.h"

namespace holdfast {

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

// Turns interception off on this thread while alive (slow path, hooks).
class Bypass {
 public:
  Bypass();
  ~Bypass();
};

void install();  // registers the kernels with the dispatcher, once

}  // namespace holdfast
