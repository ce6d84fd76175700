// A descriptor of cuDNN's backend API, destroyed with the object.
#pragma once

#include "cudnn_calls.h"

#include <utility>
#include <vector>

class Descriptor {
 public:
  explicit Descriptor(cudnnBackendDescriptorType_t type) {
    check_cudnn(cudnnBackendCreateDescriptor(type, &raw_), "create descriptor");
  }
  Descriptor(Descriptor&& other) noexcept : raw_(std::exchange(other.raw_, nullptr)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(raw_, other.raw_);
    return *this;
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (raw_ != nullptr) cudnnBackendDestroyDescriptor(raw_);
  }

  cudnnBackendDescriptor_t raw() const { return raw_; }

  Descriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t count, const void* data) {
    check_cudnn(cudnnBackendSetAttribute(raw_, name, type, count, data), "set attribute");
    return *this;
  }
  Descriptor& integers(cudnnBackendAttributeName_t name, const std::vector<int64_t>& values) {
    return set(name, CUDNN_TYPE_INT64, static_cast<int64_t>(values.size()), values.data());
  }
  Descriptor& real(cudnnBackendAttributeName_t name, float value) { return set(name, CUDNN_TYPE_FLOAT, 1, &value); }
  Descriptor& data_type(cudnnBackendAttributeName_t name, cudnnDataType_t value) {
    return set(name, CUDNN_TYPE_DATA_TYPE, 1, &value);
  }
  Descriptor& child(cudnnBackendAttributeName_t name, const Descriptor& value) {
    const cudnnBackendDescriptor_t raw = value.raw();
    return set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &raw);
  }
  Descriptor& children(cudnnBackendAttributeName_t name, const std::vector<Descriptor>& values) {
    std::vector<cudnnBackendDescriptor_t> raws;
    for (const Descriptor& value : values) raws.push_back(value.raw());
    return set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, static_cast<int64_t>(raws.size()), raws.data());
  }
  Descriptor& finalize(const char* what) {
    check_cudnn(cudnnBackendFinalize(raw_), what);
    return *this;
  }

  std::vector<Descriptor> get_children(cudnnBackendAttributeName_t name, cudnnBackendDescriptorType_t type) const {
    int64_t count = 0;
    check_cudnn(cudnnBackendGetAttribute(raw_, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, &count, nullptr), "count");
    std::vector<Descriptor> children;
    std::vector<cudnnBackendDescriptor_t> raws;
    for (int64_t i = 0; i < count; ++i) {
      children.emplace_back(type);
      raws.push_back(children.back().raw());
    }
    if (count > 0)
      check_cudnn(cudnnBackendGetAttribute(raw_, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, count, &count, raws.data()),
                  "get descriptors");
    children.erase(children.begin() + count, children.end());
    return children;
  }

 private:
  cudnnBackendDescriptor_t raw_ = nullptr;
};
