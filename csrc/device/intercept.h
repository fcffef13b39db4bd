// Interception of the products of a device, which wraps the kernels that the dispatcher has for it.
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "device/backend.h"

namespace holdfast::device {

// Wraps the product kernels of a dispatch key, "CUDA" or in tests "CPU", whose products `backend`
// verifies from then on; a second call only replaces the backend. With a backend of null they run
// unverified, and are counted so for the reason given.
void intercept(const std::string& key, Backend* backend, const std::string& reason);

// Restores the kernels that a key had before. Tests use it, as CPU has an interception of its own.
void release(const std::string& key);

// Returns whether the products of a device type are intercepted here.
bool intercepts(c10::DeviceType type);

}  // namespace holdfast::device
