// Whether products are intercepted, and who is told of faults: switches, handlers, the site hook.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "attention.h"
#include "sites.h"
#include "verify.h"

namespace holdfast {

// The stages of a GEMM, and those of a tile of fused attention (attention.h, Place).
enum class Stage : int {
  checksum,
  operand,
  output,
  scores,
  probabilities,
  accumulator,
  state,
  grad_probabilities,
  grad_query,
  grad_key,
  grad_value,
  grad_scores,
  exponentials,
  grad_softmax
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

using SuspectHandler = std::function<void(const Suspicion&)>;
using DamageHandler = std::function<void(const SiteKey&)>;  // a kept encoding was found damaged
using SiteHook =
    std::function<void(Stage, const SiteKey&, const Problem&, const Encoding&, const at::Tensor&)>;

// What fused attention found and decided already; `output` is there for its device.
using AttentionHandler =
    std::function<void(const SiteKey&, const AttentionReport&, const at::Tensor& output)>;

void set_handlers(SuspectHandler suspect, DamageHandler damage);
void set_attention_handler(AttentionHandler handler);
void arm(SiteHook hook);  // an empty hook disarms
bool armed();

// Calls what was set, with this thread's interception off. Throws if nothing was.
void report(const Suspicion& suspicion);
void report_damage(const SiteKey& key);
void report(const SiteKey& key, const AttentionReport& found, const at::Tensor& output);

// Shows a stage to the hook, if one is armed.
void visit(
    Stage stage, const SiteKey& key, const Problem& p, const Encoding& e, const at::Tensor& out);

// Verification is on while any of these is positive: process-wide count, or this thread's.
void change_process_depth(int delta);
void change_thread_depth(int delta);
void change_thread_bypass(int delta);  // positive: this thread's products are not intercepted

bool verifying();
bool intercepting();  // whether this thread's products are to be looked at

// A product that is not verified: counted under its site, so that the report names it.
void note_uncovered(Op op);

// Turns interception off on this thread while alive (slow path, hooks).
class Bypass {
 public:
  Bypass();
  ~Bypass();
};

}  // namespace holdfast
