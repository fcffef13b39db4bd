// The ledger of a device: for each site the largest |D| / T of its products, which their checks
// write on the device and the host reads once a step.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "core/sites.h"

namespace holdfast::device {

// Allocates a device's ledger, so that none is allocated while a graph is captured.
void prepare_ledger(const at::Device& device);

// Returns the slot of a site, int32 [1]: the bits of a float that is not negative, whose order as
// integers is that of the floats, with NaN above all. A slot is never given to another site, as a
// captured graph may write to it for ever.
at::Tensor slot_of(const SiteKey& key, const at::Device& device);

// Returns the part of a device's ledger in use, int32 [slots], and the sites of its slots.
std::pair<at::Tensor, std::vector<SiteKey>> ledger_of(const at::Device& device);

// Returns the devices that have a ledger.
std::vector<c10::Device> ledger_devices();

// Returns the number of checks that were queued on a device, of which a captured graph counts only
// the first run, and whether any was queued while a graph was captured.
std::pair<int64_t, bool> checks_queued(const at::Device& device);
void note_check(const at::Device& device);
// Returns whether a graph is captured on the current stream of a device.
bool capturing(const at::Device& device);

}  // namespace holdfast::device
