// Executes plans without Python, and joins scans with gradients to autograd.
//
// A plan for tensors of one layout is told once: which tensors a kernel writes, its address, and its arguments. After that a
// call allocates, launches and, where gradients are asked for, notes what its backward needs; the backward, in autograd's
// thread, does the same. Where a backward is not like one that was told, Python's does it.
//
// Tensors are counted so, without those that are not there:
//   forward    those of a call, and behind them what the kernel writes: results, the last of them bits, and what is kept
//   backward   those of the call, what is kept, the gradients of results but bits (undefined: there is none), and behind them
//              what the kernel writes: for each tensor of the call its gradient, if it is needed
//   last       what is there before a backward's kernel writes, the gradients as they are then, constants, what it writes

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/utils/pybind.h>

#include <ATen/Parallel.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

// Its nodes have names in graphs, profiles and errors.
namespace flexsn {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Tensors = std::vector<std::optional<at::Tensor>>;

// Of the CUDA driver and of torch, by address: nothing of CUDA is needed to compile this.
using LaunchOnGpu = int (*)(
    void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
using CurrentStream = int (*)(std::int32_t, void**);
LaunchOnGpu launch_on_gpu = nullptr;
CurrentStream current_stream = nullptr;

// What a prepared launch depends on of a tensor, and what the dispatcher sees in it: a subclass, or a lazy negation.
class Layout {
 public:
  explicit Layout(const at::Tensor& tensor)
      : sizes_(tensor.sizes().vec()),
        strides_(tensor.strides().vec()),
        keys_(tensor.key_set()),
        dtype_(tensor.scalar_type()),
        device_(tensor.device()),
        place_(place(tensor)) {}

  bool is_of(const at::Tensor& tensor) const {
    return tensor.key_set() == keys_ && tensor.scalar_type() == dtype_ && tensor.device() == device_ &&
        tensor.sizes().equals(sizes_) && tensor.strides().equals(strides_) && place(tensor) == place_;
  }

 private:
  static int place(const at::Tensor& tensor) {
    const auto address = reinterpret_cast<std::uintptr_t>(tensor.data_ptr());
    return address == 0 ? -1 : static_cast<int>(address % 16);
  }

  std::vector<std::int64_t> sizes_, strides_;
  c10::DispatchKeySet keys_;
  at::ScalarType dtype_;
  at::Device device_;
  int place_;
};

// A tensor that a kernel writes, in each call another one.
class Written {
 public:
  explicit Written(const at::Tensor& like)
      : sizes_(like.sizes().vec()), strides_(like.strides().vec()), dtype_(like.scalar_type()) {}

  at::Tensor allocate(at::Device device) const {
    return at::empty_strided(sizes_, strides_, at::TensorOptions().dtype(dtype_).device(device));
  }

  // Bytes from one part along the first dimension to the next.
  std::int64_t step() const {
    return strides_[0] * static_cast<std::int64_t>(c10::elementSize(dtype_));
  }

 private:
  std::vector<std::int64_t> sizes_, strides_;
  at::ScalarType dtype_;
};

void* address_of(const at::Tensor& tensor) {
  void* const address = tensor.data_ptr();
  TORCH_CHECK(
      address != nullptr || tensor.numel() == 0,
      "a tensor of a compiled scan has no memory. Inside of FakeTensorMode and the like, use backend='torch' or 'hop'.");
  return address;
}

// The driver launches in the thread's context, and crashes where there is none: in a thread that has used no GPU so far. An
// operation of torch's makes one.
void have_context(at::Device device) {
  thread_local std::vector<bool> there;
  const auto index = static_cast<std::size_t>(device.index());
  if (there.size() <= index)
    there.resize(index + 1);
  if (!there[index])
    at::zeros({1}, at::TensorOptions().device(device)).add_(1);
  there[index] = true;
}

// A compiled kernel with all of its arguments but the tensors.
//
// `places`: where each tensor that it takes is among those of a call. `numbers`: behind the tensors, of at most 8 bytes each.
// `kept`: what has to live as long as the address is called.
class Kernel {
 public:
  Kernel(
      std::uintptr_t entry,
      std::vector<std::size_t> places,
      std::vector<std::int64_t> numbers,
      unsigned programs,
      unsigned threads,
      unsigned shared,
      py::object kept)
      : entry_(entry),
        places_(std::move(places)),
        numbers_(std::move(numbers)),
        programs_(programs),
        threads_(threads),
        shared_(shared),
        kept_(std::move(kept)) {}
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;
  ~Kernel() { // whichever thread is the last to have it
    py::gil_scoped_acquire gil;
    kept_ = py::object();
  }

  void launch(const std::vector<void*>& addresses, at::Device device) const {
    std::vector<std::int64_t> arguments;
    arguments.reserve(places_.size() + numbers_.size() + 1);
    for (const auto place : places_)
      arguments.push_back(reinterpret_cast<std::int64_t>(addresses[place]));
    arguments.insert(arguments.end(), numbers_.begin(), numbers_.end());
    if (device.is_cpu()) {
      arguments.push_back(at::get_num_threads());
      reinterpret_cast<void (*)(const std::int64_t*)>(entry_)(arguments.data());
    } else {
      launch_on(device, arguments);
    }
  }

 private:
  void launch_on(at::Device device, std::vector<std::int64_t>& arguments) const {
    const c10::DeviceGuard guard(device);
    have_context(device);
    void* stream = nullptr;
    TORCH_CHECK(current_stream(device.index(), &stream) == 0, "torch does not tell the current stream of ", device);
    std::vector<void*> pointers;
    pointers.reserve(arguments.size());
    for (auto& argument : arguments)
      pointers.push_back(&argument);
    const int failed = launch_on_gpu(
        reinterpret_cast<void*>(entry_), programs_, 1, 1, threads_, 1, 1, shared_, stream, pointers.data(), nullptr);
    TORCH_CHECK(failed == 0, "a scan kernel was not launched on ", device, ": CUDA driver error ", failed);
  }

  std::uintptr_t entry_;
  std::vector<std::size_t> places_;
  std::vector<std::int64_t> numbers_;
  unsigned programs_, threads_, shared_;
  py::object kept_;
};

// What becomes of a gradient that a kernel has written: it is seen in a shape and summed over dimensions, again and again,
// and at last in the shape and the dtype of what it is the gradient of.
class Sum {
 public:
  using Steps = std::vector<std::pair<std::optional<std::vector<std::int64_t>>, std::vector<std::int64_t>>>;

  Sum(Steps steps, std::vector<std::int64_t> shape, const at::Tensor& like)
      : steps_(std::move(steps)), shape_(std::move(shape)), dtype_(like.scalar_type()) {}

  at::Tensor of(at::Tensor tensor) const {
    for (const auto& [shape, dims] : steps_) {
      const auto seen = shape ? tensor.view(*shape) : tensor;
      tensor = dims.empty() ? seen.sum() : seen.sum(dims);
    }
    return tensor.view(shape_).to(dtype_);
  }

 private:
  Steps steps_;
  std::vector<std::int64_t> shape_;
  at::ScalarType dtype_;
};

// Gradients that a kernel writes to one memory, one behind the other, and one sum for all of them.
struct Together {
  std::vector<std::size_t> results;
  Written written;
  Sum sum;
};

// What a call allocates and launches.
class Plan {
 public:
  Plan(const std::vector<at::Tensor>& written, std::shared_ptr<Kernel> kernel)
      : written_{written.begin(), written.end()}, kernel_(std::move(kernel)) {}

  std::size_t count() const {
    return written_.size();
  }

  // `tensors`: those of a call that are there.
  variable_list run(at::TensorList tensors) const {
    RECORD_FUNCTION("flexsn::scan", std::vector<c10::IValue>());
    const auto device = tensors[0].device();
    variable_list results;
    std::vector<void*> addresses;
    results.reserve(written_.size());
    addresses.reserve(tensors.size() + written_.size());
    for (const auto& tensor : tensors)
      addresses.push_back(address_of(tensor));
    for (const auto& one : written_) {
      results.push_back(one.allocate(device));
      addresses.push_back(address_of(results.back()));
    }
    kernel_->launch(addresses, device);
    return results;
  }

 private:
  std::vector<Written> written_;
  std::shared_ptr<Kernel> kernel_;
};

variable_list present(const Tensors& tensors) {
  variable_list these;
  for (const auto& tensor : tensors)
    if (tensor)
      these.push_back(*tensor);
  return these;
}

// The forward: the plan's results begin with `first_kept` of the call, of which those from `first_bits` on are bits, and no
// gradient flows through those in `fixed`; behind them is what the backward needs.
struct Forward {
  Plan plan;
  std::size_t first_bits, first_kept;
  std::vector<std::size_t> fixed;
};

// What makes another gradient of the first tensor's, of all that is there then: what is given, the gradients, and `constants`.
struct Last {
  std::shared_ptr<Kernel> kernel;
  Written written;
  std::vector<at::Tensor> constants;

  // `addresses`: of what is given.
  at::Tensor of(std::vector<void*> addresses, const variable_list& gradients, at::Device device) const {
    for (const auto& gradient : gradients)
      addresses.push_back(gradient.defined() ? address_of(gradient) : nullptr);
    for (const auto& constant : constants)
      addresses.push_back(address_of(constant));
    auto found = written.allocate(device);
    addresses.push_back(address_of(found));
    kernel->launch(addresses, device);
    return found;
  }
};

// A backward: of tensors and gradients of these layouts, for these needs.
struct Backward {
  std::vector<std::optional<Layout>> given;
  std::vector<bool> needed;
  std::vector<std::optional<Written>> written; // for each tensor of the forward; of those that are needed, here or in `last`
  std::shared_ptr<Kernel> kernel;
  std::vector<std::pair<std::size_t, Written>> copies; // of what is given, which the kernel cannot read as it is
  std::vector<std::optional<Sum>> sums; // of some of them
  std::vector<Together> together; // others of them, which `written` lacks
  std::optional<Last> last;
  bool asks; // whether formulas read something of Python's, which is to be as it was

  bool is_like(const variable_list& tensors, const std::vector<bool>& needs) const {
    const auto fits = [](const at::Tensor& tensor, const std::optional<Layout>& layout) {
      return tensor.defined() == layout.has_value() && (!layout || layout->is_of(tensor));
    };
    return needs == needed && std::equal(tensors.begin(), tensors.end(), given.begin(), given.end(), fits);
  }
};

constexpr std::size_t most_told = 16; // layouts that take turns

class Scan : public torch::CustomClassHolder {
 public:
  // `owner`: gives the `TrainedScan`, which goes on where this cannot, or, if it is gone, None or an error: see `_present`. It is
  // not held here: its step may have the neuron, and that this in the graph of its last state, a circle that nobody would see.
  // `there`: which of a call's tensors are; the others are states that begin with zeros.
  Scan(
      py::object owner,
      std::vector<bool> there,
      const std::vector<at::Tensor>& written,
      std::shared_ptr<Kernel> kernel,
      std::size_t first_bits,
      std::size_t first_kept,
      std::vector<std::size_t> fixed)
      : there(std::move(there)),
        forward{Plan(written, std::move(kernel)), first_bits, first_kept, std::move(fixed)},
        owner_(std::move(owner)) {}
  Scan(const Scan&) = delete;
  Scan& operator=(const Scan&) = delete;
  ~Scan() override {
    py::gil_scoped_acquire gil;
    owner_ = py::object();
  }

  variable_list run(const Tensors& tensors);

  py::object owner(bool needed) const {
    return owner_(needed);
  }

  void follow(
      const Tensors& given,
      std::vector<bool> needed,
      const Tensors& written,
      std::shared_ptr<Kernel> kernel,
      const std::vector<std::pair<std::size_t, at::Tensor>>& copies,
      std::vector<std::optional<Sum>> sums,
      std::vector<Together> together,
      std::optional<Last> last,
      bool asks) {
    auto told = std::make_shared<Backward>();
    for (const auto& tensor : given)
      told->given.push_back(tensor ? std::optional<Layout>(*tensor) : std::nullopt);
    for (const auto& tensor : written)
      told->written.push_back(tensor ? std::optional<Written>(*tensor) : std::nullopt);
    told->needed = std::move(needed);
    told->kernel = std::move(kernel);
    for (const auto& [place, like] : copies)
      told->copies.emplace_back(place, Written(like));
    told->sums = std::move(sums);
    for (const auto& group : together)
      for (const auto i : group.results)
        told->written[i] = std::nullopt;
    told->together = std::move(together);
    told->last = std::move(last);
    told->asks = asks;
    std::shared_ptr<const Backward> oldest; // is gone when the lock is
    const std::lock_guard<std::mutex> lock(mutex_);
    backwards_.insert(backwards_.begin(), std::move(told));
    if (backwards_.size() > most_told) {
      oldest = std::move(backwards_.back());
      backwards_.pop_back();
    }
  }

  // The one that was told of tensors and needs like these.
  std::shared_ptr<const Backward> backward(const variable_list& given, const std::vector<bool>& needed) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& told : backwards_)
      if (told->is_like(given, needed))
        return told;
    return nullptr;
  }

  const std::vector<bool> there;
  const Forward forward;

 private:
  py::object owner_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<const Backward>> backwards_;
};

struct ScanBackward : torch::autograd::Function<ScanBackward> {
  // `tensors`: those of a call that are there.
  static variable_list forward(AutogradContext* context, const c10::intrusive_ptr<Scan>& scan, at::TensorList tensors) {
    const auto& [plan, first_bits, first_kept, fixed] = scan->forward;
    variable_list saved(tensors.begin(), tensors.end()), results = plan.run(tensors);
    for (auto i = first_kept; i < results.size(); ++i)
      saved.push_back(std::move(results[i]));
    results.resize(first_kept);
    context->save_for_backward(std::move(saved));
    context->set_materialize_grads(false);
    context->saved_data["scan"] = c10::IValue::make_capsule(scan);
    if (!fixed.empty()) {
      variable_list without;
      for (const auto i : fixed)
        without.push_back(results[i]);
      context->mark_non_differentiable(without);
    }
    return results;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto scan = c10::static_intrusive_pointer_cast<Scan>(context->saved_data["scan"].toCapsule());
    variable_list given;
    try {
      given = context->get_saved_variables();
    } catch (const c10::Error& error) {
      TORCH_CHECK(std::string(error.what_without_backtrace()).find("second time") == std::string::npos,
                  "backward a second time through a scan whose graph an earlier backward has freed. If this is the "
                  "next training step, a state that the scan returned still belongs to the graph of an earlier "
                  "step: reset it between sequences (functional.reset_net(net), neuron.reset()), or cut it off "
                  "between parts of one sequence (functional.detach_net(net), neuron.detach()). To go through one "
                  "graph twice, give the first backward retain_graph=True.");
      throw;
    }
    const auto kept = scan->forward.plan.count() - scan->forward.first_kept;
    const auto count = given.size() - kept;
    std::vector<bool> needed;
    for (std::size_t i = 0; i < count; ++i)
      needed.push_back(context->needs_input_grad(i));
    gradients.resize(scan->forward.first_bits);
    for (auto& gradient : gradients)
      given.push_back(std::move(gradient));
    // Python refuses in its own words what no kernel may read.
    const bool refused = c10::impl::TorchDispatchModeTLS::any_modes_set() || has_unreadable(given);
    const auto told = at::GradMode::is_enabled() || refused ? nullptr : scan->backward(given, needed);
    variable_list found{at::Tensor()}; // of what is no tensor
    if (told != nullptr && (!told->asks || reads_hold(*scan)))
      append(found, launched(*told, given));
    else
      append(found, of_python(*scan, given, needed));
    return found;
  }

 private:
  static void append(variable_list& all, variable_list more) {
    for (auto& one : more)
      all.push_back(std::move(one));
  }

  static bool has_unreadable(const variable_list& tensors) {
    return std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) {
      return tensor.defined() && tensor.numel() != 0 && (!tensor.has_storage() || tensor.data_ptr() == nullptr);
    });
  }

  static bool reads_hold(const Scan& scan) {
    py::gil_scoped_acquire gil;
    try {
      const auto owner = scan.owner(false);
      return owner.is_none() || owner.attr("reads_hold")().cast<bool>();
    } catch (py::error_already_set& error) {
      raised(error);
    }
  }

  static variable_list launched(const Backward& told, variable_list& given) {
    const auto device = given[0].device();
    variable_list gradients;
    for (const auto& [place, copy] : told.copies)
      given[place] = copy.allocate(device).copy_(given[place]);
    std::vector<void*> addresses;
    addresses.reserve(given.size() + told.written.size());
    for (const auto& tensor : given)
      addresses.push_back(tensor.defined() ? address_of(tensor) : nullptr);
    for (const auto& one : told.written) {
      gradients.push_back(one ? one->allocate(device) : at::Tensor());
      addresses.push_back(one ? address_of(gradients.back()) : nullptr);
    }
    variable_list wholes;
    for (const auto& group : told.together) {
      wholes.push_back(group.written.allocate(device));
      auto* address = static_cast<char*>(address_of(wholes.back()));
      for (const auto i : group.results) {
        addresses[given.size() + i] = address;
        address += group.written.step();
      }
    }
    told.kernel->launch(addresses, device);
    for (std::size_t i = 0; i < gradients.size(); ++i)
      if (gradients[i].defined() && told.sums[i])
        gradients[i] = told.sums[i]->of(std::move(gradients[i]));
    for (std::size_t j = 0; j < wholes.size(); ++j) {
      const auto& group = told.together[j];
      const auto parts = group.sum.of(std::move(wholes[j])).unbind();
      for (std::size_t k = 0; k < parts.size(); ++k)
        gradients[group.results[k]] = parts[k].detach(); // no view: it is a result
    }
    if (told.last) {
      addresses.resize(given.size());
      gradients[0] = told.last->of(std::move(addresses), gradients, device);
      for (std::size_t i = 0; i < gradients.size(); ++i)
        if (!told.needed[i])
          gradients[i] = at::Tensor();
    }
    return gradients;
  }

  static variable_list of_python(const Scan& scan, const variable_list& given, const std::vector<bool>& needed) {
    py::gil_scoped_acquire gil;
    try {
      py::list all, needs;
      std::size_t next = 0, need = 0;
      for (const bool there : scan.there) {
        all.append(there ? py::cast(given[next++]) : py::none());
        needs.append(there && needed[need++]);
      }
      for (; next < given.size(); ++next)
        all.append(given[next].defined() ? py::cast(given[next]) : py::none());
      const auto gradients = scan.owner(true).attr("gradients")(all, needs).cast<Tensors>();
      variable_list found;
      for (std::size_t i = 0; i < scan.there.size(); ++i)
        if (scan.there[i])
          found.push_back(gradients[i].value_or(at::Tensor()));
      return found;
    } catch (py::error_already_set& error) {
      raised(error);
    }
  }

  // As torch hands on an error of Python's through its engine.
  [[noreturn]] static void raised(py::error_already_set& error) {
    error.restore();
    python_error handed;
    handed.persist();
    throw std::move(handed);
  }
};

variable_list Scan::run(const Tensors& tensors) {
  const auto these = present(tensors);
  const auto self = c10::intrusive_ptr<Scan>::reclaim_copy(this);
  const py::gil_scoped_release others_may_run;
  return ScanBackward::apply(self, at::TensorList(these));
}

} // namespace flexsn

using namespace flexsn;

PYBIND11_MODULE(flexsn_launcher, module) {
  module.def("on_gpu", [](std::uintptr_t launch, std::uintptr_t stream) {
    launch_on_gpu = reinterpret_cast<LaunchOnGpu>(launch);
    current_stream = reinterpret_cast<CurrentStream>(stream);
  });
  py::class_<Kernel, std::shared_ptr<Kernel>>(module, "Kernel")
      .def(py::init<
           std::uintptr_t,
           std::vector<std::size_t>,
           std::vector<std::int64_t>,
           unsigned,
           unsigned,
           unsigned,
           py::object>());
  py::class_<Sum>(module, "Sum").def(py::init<Sum::Steps, std::vector<std::int64_t>, const at::Tensor&>());
  py::class_<Together>(module, "Together")
      .def(py::init([](std::vector<std::size_t> results, const at::Tensor& written, Sum sum) {
        return Together{std::move(results), Written(written), std::move(sum)};
      }));
  py::class_<Last>(module, "Last")
      .def(py::init([](std::shared_ptr<Kernel> kernel, const at::Tensor& written, std::vector<at::Tensor> constants) {
        return Last{std::move(kernel), Written(written), std::move(constants)};
      }));
  py::class_<Plan>(module, "Plan")
      .def(py::init<const std::vector<at::Tensor>&, std::shared_ptr<Kernel>>())
      .def("run", torch::wrap_pybind_function([](const Plan& plan, const Tensors& tensors) {
        const auto these = present(tensors);
        const py::gil_scoped_release others_may_run;
        return plan.run(these);
      }));
  py::class_<Scan, c10::intrusive_ptr<Scan>>(module, "Scan")
      .def(py::init<
           py::object,
           std::vector<bool>,
           const std::vector<at::Tensor>&,
           std::shared_ptr<Kernel>,
           std::size_t,
           std::size_t,
           std::vector<std::size_t>>())
      .def("run", torch::wrap_pybind_function([](Scan& scan, const Tensors& tensors) {
        return scan.run(tensors); // with torch's own exceptions, as of memory that is too small
      }))
      .def("follow", &Scan::follow);
}
