// Executes recorded calls without Python, and connects scans with gradients to autograd.
//
// A call on tensors of one layout is registered once, as a program: its allocations, launches and operator calls, in order. The
// tensors of a program have numbers. The arguments have the first numbers. The forward of a scan is a program. If gradients are
// required, the forward saves the tensors that its backward needs. The backward is another program, which runs in autograd's
// thread. If no backward is registered for the layouts of a backward's arguments and for the gradients that are needed,
// Python computes the gradients.
//
// Programs have these arguments and results. Absent tensors of a call are omitted:
//   forward    arguments: the tensors of the call
//              results: the results of the call, the last of which may be bits, followed by the results that are saved
//   backward   arguments: the tensors of the call, the saved results, and the gradients of all results except bits (undefined if
//              a gradient is absent)
//              results: the gradient of each tensor of the call (undefined if the gradient is not needed, or is zero)
// A scan may specify other tensors that are saved (`saved`), instead of the tensors of the call and the saved results.

// With this macro, torch's headers include only the headers of the operators that they use.
#define AT_PER_OPERATOR_HEADERS

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

// Functions of torch. They are declared here because including <torch/csrc/jit/python/pybind_utils.h> and <ATen/autocast_mode.h>,
// which declare them, lengthens the compilation of this file by a third.
namespace torch::jit {
TORCH_PYTHON_API c10::IValue toIValue(py::handle object, const c10::TypePtr& type, std::optional<std::int32_t> size);
} // namespace torch::jit
namespace at::autocast {
TORCH_API bool is_autocast_enabled(at::DeviceType device);
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device);
} // namespace at::autocast

// The namespace is part of the names of autograd nodes in graphs, profiles and errors.
namespace flexsn {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Tensors = std::vector<std::optional<at::Tensor>>;

// Functions of the CUDA driver and of torch. They are called by address, so that compiling this file does not require CUDA.
using LaunchOnGpu = int (*)(
    void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
using LaunchTogether =
    int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**);
using CurrentStream = int (*)(std::int32_t, void**);
LaunchOnGpu launch_on_gpu = nullptr;
LaunchTogether launch_together = nullptr; // launches programs that wait for each other
CurrentStream current_stream = nullptr;

// The properties of a tensor on which a prepared launch depends, and its dispatch keys, such as the key of a lazy negation.
class Layout {
 public:
  explicit Layout(const at::Tensor& tensor)
      : sizes_(tensor.sizes().vec()),
        strides_(tensor.strides().vec()),
        keys_(tensor.key_set()),
        dtype_(tensor.scalar_type()),
        device_(tensor.device()),
        alignment_(alignment(tensor)) {}

  bool is_of(const at::Tensor& tensor) const {
    return tensor.key_set() == keys_ && tensor.scalar_type() == dtype_ && tensor.device() == device_ &&
        tensor.sizes().equals(sizes_) && tensor.strides().equals(strides_) && alignment(tensor) == alignment_;
  }

 private:
  static int alignment(const at::Tensor& tensor) {
    const auto address = reinterpret_cast<std::uintptr_t>(tensor.data_ptr());
    return address == 0 ? -1 : static_cast<int>(address % 16);
  }

  std::vector<std::int64_t> sizes_, strides_;
  c10::DispatchKeySet keys_;
  at::ScalarType dtype_;
  at::Device device_;
  int alignment_;
};

void* address_of(const at::Tensor& tensor) {
  void* const address = tensor.data_ptr();
  TORCH_CHECK(
      address != nullptr || tensor.numel() == 0,
      "a tensor of a compiled scan has no memory. Inside of FakeTensorMode and the like, use backend='torch' or 'hop'.");
  return address;
}

// Creates a CUDA context for this thread, by an operation of torch. The driver launches in the context of the thread, and crashes
// in a thread without a context, that is, a thread that has not used a GPU before.
void ensure_context(at::Device device) {
  thread_local std::vector<bool> has_context;
  const auto index = static_cast<std::size_t>(device.index());
  if (has_context.size() <= index)
    has_context.resize(index + 1);
  if (!has_context[index])
    at::zeros({1}, at::TensorOptions().device(device)).add_(1);
  has_context[index] = true;
}

// Throws a Python error in the form in which torch passes Python errors through its autograd engine.
[[noreturn]] void rethrow(py::error_already_set& error) {
  error.restore();
  python_error torch_error;
  torch_error.persist();
  throw std::move(torch_error);
}

// The launch of a compiled kernel.
//
// `places`: numbers of the tensors that the kernel takes. `offsets`: for each tensor, bytes to add to its address. `numbers`: the
// arguments after the tensors, of at most 8 bytes each. `kept`: object that must exist as long as the kernel is called.
// `beside`: size of the second dimension of the grid on a GPU. `together`: true if programs wait for each other.
struct Kernel {
  std::uintptr_t entry;
  std::vector<std::size_t> places;
  std::vector<std::int64_t> offsets, numbers;
  unsigned programs, beside, threads, shared;
  bool together;
  py::object kept;

  void run(const variable_list& tensors, at::Device device) const {
    c10::SmallVector<std::int64_t, 48> arguments;
    for (std::size_t i = 0; i < places.size(); ++i) {
      const auto& tensor = tensors[places[i]];
      arguments.push_back(tensor.defined() ? reinterpret_cast<std::int64_t>(address_of(tensor)) + offsets[i] : 0);
    }
    arguments.append(numbers.begin(), numbers.end());
    if (device.is_cpu()) {
      arguments.push_back(at::get_num_threads());
      reinterpret_cast<void (*)(const std::int64_t*)>(entry)(arguments.data());
      return;
    }
    const c10::DeviceGuard guard(device);
    ensure_context(device);
    void* stream = nullptr;
    TORCH_CHECK(current_stream(device.index(), &stream) == 0, "torch does not provide the current stream of ", device);
    c10::SmallVector<void*, 48> pointers;
    for (auto& argument : arguments)
      pointers.push_back(&argument);
    const auto function = reinterpret_cast<void*>(entry);
    const int failed = together
        ? launch_together(function, programs, beside, 1, threads, 1, 1, shared, stream, pointers.data())
        : launch_on_gpu(function, programs, beside, 1, threads, 1, 1, shared, stream, pointers.data(), nullptr);
    TORCH_CHECK(failed == 0, "a scan kernel was not launched on ", device, ": CUDA driver error ", failed);
  }
};

struct Allocated {
  std::size_t into;
  std::vector<std::int64_t> sizes, strides;
  at::TensorOptions options;

  void run(variable_list& tensors) const {
    tensors[into] = at::empty_strided(sizes, strides, options);
  }
};

// Provides a tensor that is the same object in each call.
struct Fixed {
  std::size_t into;
  at::Tensor tensor;

  void run(variable_list& tensors) const {
    tensors[into] = tensor;
  }
};

struct Viewed {
  std::size_t into, base;
  std::vector<std::int64_t> sizes, strides;
  std::int64_t offset;

  void run(variable_list& tensors) const {
    tensors[into] = at::as_strided(tensors[base], sizes, strides, offset);
  }
};

// Calls an operator. All arguments except for tensors are fixed.
struct Operator {
  struct Hole {
    std::size_t argument;
    bool is_list;
    std::vector<std::size_t> places;
  };

  c10::OperatorHandle handle;
  torch::jit::Stack arguments; // with an empty value in place of each tensor
  std::vector<Hole> holes;
  std::vector<std::size_t> into; // empty if the returned tensors already have numbers

  // Converts a Python number that is passed for a tensor argument to a tensor, as torch does.
  static py::object as_tensor(const py::object& value) {
    if (!PyBool_Check(value.ptr()) && !PyLong_Check(value.ptr()) && !PyFloat_Check(value.ptr()))
      return value;
    auto tensor = at::scalar_tensor(
        torch::jit::toIValue(value, c10::NumberType::get(), std::nullopt).toScalar(),
        PyBool_Check(value.ptr()) ? at::kBool : PyLong_Check(value.ptr()) ? at::kLong : at::kDouble);
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
    return py::cast(tensor);
  }

  // Returns the values of an operator's parameters. A parameter without a Python argument has its default value.
  static torch::jit::Stack convert(const c10::FunctionSchema& schema, const py::tuple& args, const py::dict& kwargs) {
    const auto& parameters = schema.arguments();
    TORCH_CHECK(args.size() <= parameters.size(), schema, " has fewer parameters than the ", args.size(), " arguments");
    torch::jit::Stack values;
    std::size_t used = args.size();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto& parameter = parameters[i];
      py::object value;
      if (i < args.size()) {
        value = parameter.type()->kind() == c10::TypeKind::TensorType ? as_tensor(args[i]) : py::object(args[i]);
      } else if (kwargs.contains(parameter.name())) {
        value = kwargs[py::str(parameter.name())];
        ++used;
      } else {
        TORCH_CHECK(parameter.default_value(), schema, " needs the argument '", parameter.name(), "'");
        values.push_back(*parameter.default_value());
        continue;
      }
      values.push_back(torch::jit::toIValue(value, parameter.type(), parameter.N()));
    }
    TORCH_CHECK(used == args.size() + kwargs.size(), schema, " does not have parameters for all of the named arguments");
    return values;
  }

  // `stand_ins`: the tensors in the arguments. They stand for the tensors with the numbers `places`.
  static Operator of(
      const std::string& name,
      const std::string& overload,
      const py::tuple& args,
      const py::dict& kwargs,
      const variable_list& stand_ins,
      const std::vector<std::size_t>& places,
      std::vector<std::size_t> into) {
    const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    auto arguments = convert(handle.schema(), args, kwargs);
    std::unordered_map<const void*, std::size_t> number_by_tensor;
    for (std::size_t i = 0; i < stand_ins.size(); ++i)
      number_by_tensor[stand_ins[i].unsafeGetTensorImpl()] = places[i];
    std::vector<Hole> holes;
    std::size_t count = 0;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      Hole hole{i, arguments[i].isTensorList(), {}};
      if (hole.is_list)
        for (const at::Tensor& tensor : arguments[i].toTensorList())
          hole.places.push_back(number_by_tensor.at(tensor.unsafeGetTensorImpl()));
      else if (arguments[i].isTensor() && arguments[i].toTensor().defined())
        if (const auto entry = number_by_tensor.find(arguments[i].toTensor().unsafeGetTensorImpl());
            entry != number_by_tensor.end())
          hole.places.push_back(entry->second);
      if (hole.places.empty())
        continue;
      count += hole.places.size();
      arguments[i] = c10::IValue();
      holes.push_back(std::move(hole));
    }
    TORCH_CHECK(count == stand_ins.size(), name, " takes tensors in a form that the compiled launcher does not support");
    return {handle, std::move(arguments), std::move(holes), std::move(into)};
  }

  void run(variable_list& tensors) const {
    auto stack = arguments;
    for (const auto& hole : holes) {
      if (!hole.is_list) {
        stack[hole.argument] = tensors[hole.places[0]];
        continue;
      }
      c10::List<at::Tensor> list;
      list.reserve(hole.places.size());
      for (const auto place : hole.places)
        list.push_back(tensors[place]);
      stack[hole.argument] = std::move(list);
    }
    handle.callBoxed(stack);
    auto next = into.begin();
    const auto take = [&](at::Tensor tensor) {
      if (next != into.end())
        tensors[*next++] = std::move(tensor);
    };
    for (auto& value : stack) {
      if (value.isTensor()) {
        take(std::move(value).toTensor());
      } else if (value.isTensorList()) {
        for (at::Tensor tensor : value.toTensorVector())
          take(std::move(tensor));
      }
    }
    TORCH_CHECK(next == into.end(), handle.operator_name(), " returns fewer tensors than in the recorded call");
  }
};

// Increases the version counters of tensors to which a kernel has written.
struct Bumped {
  std::vector<std::size_t> places;

  void run(const variable_list& tensors) const {
    for (const auto place : places)
      if (!tensors[place].is_inference())
        tensors[place].unsafeGetTensorImpl()->bump_version();
  }
};

// Checks a number in the host's memory. If it is not 0, calls a Python function that raises an error.
struct Checked {
  at::Tensor number;
  py::object check;

  void run() const {
    if (*static_cast<volatile const std::int32_t*>(number.data_ptr()) == 0)
      return;
    py::gil_scoped_acquire gil;
    try {
      check();
    } catch (py::error_already_set& error) {
      rethrow(error);
    }
  }
};

// A recorded call.
class Program {
 public:
  // `count`: number of all tensors. `given`: numbers of the tensors that `run` receives.
  Program(std::size_t count, std::vector<std::size_t> given) : count_(count), given_(std::move(given)) {}
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  ~Program() { // any thread may drop the last reference, without the interpreter's lock
    py::gil_scoped_acquire gil;
    lines_.clear();
  }

  template <class Line>
  void add(Line line) {
    has_operators_ = has_operators_ || std::is_same_v<Line, Operator>;
    lines_.push_back(std::move(line));
  }

  void returns(std::vector<std::optional<std::size_t>> results) {
    results_ = std::move(results);
  }

  // `arguments`: the tensors with the numbers `given`, in this order. A tensor may be undefined.
  variable_list run(at::TensorList arguments) const {
    RECORD_FUNCTION("flexsn::scan", std::vector<c10::IValue>());
    const at::NoGradGuard no_grad;
    std::optional<c10::impl::ExcludeDispatchKeyGuard> no_autocast; // the program contains the casts of autocast
    if (has_operators_)
      no_autocast.emplace(c10::autocast_dispatch_keyset);
    const auto device = arguments[0].device();
    variable_list tensors(count_), results;
    for (std::size_t i = 0; i < given_.size(); ++i)
      tensors[given_[i]] = arguments[i];
    for (const auto& line : lines_) {
      if (const auto* kernel = std::get_if<Kernel>(&line))
        kernel->run(tensors, device);
      else if (const auto* allocated = std::get_if<Allocated>(&line))
        allocated->run(tensors);
      else if (const auto* called = std::get_if<Operator>(&line))
        called->run(tensors);
      else if (const auto* viewed = std::get_if<Viewed>(&line))
        viewed->run(tensors);
      else if (const auto* fixed = std::get_if<Fixed>(&line))
        fixed->run(tensors);
      else if (const auto* bumped = std::get_if<Bumped>(&line))
        bumped->run(tensors);
      else
        std::get<Checked>(line).run();
    }
    results.reserve(results_.size());
    for (const auto& place : results_) {
      results.push_back(place ? tensors[*place] : at::Tensor());
      if (results.back().defined() && results.back().is_view())
        results.back() = results.back().detach(); // a result must not be a view
    }
    return results;
  }

 private:
  std::size_t count_;
  std::vector<std::size_t> given_;
  std::vector<std::variant<Kernel, Allocated, Operator, Viewed, Fixed, Bumped, Checked>> lines_;
  std::vector<std::optional<std::size_t>> results_;
  bool has_operators_ = false;
};

using SharedProgram = std::shared_ptr<const Program>;

variable_list present(const Tensors& tensors) {
  variable_list present_tensors;
  for (const auto& tensor : tensors)
    if (tensor)
      present_tensors.push_back(*tensor);
  return present_tensors;
}

// The forward of a scan.
//
// The first `first_kept` results of the program are the results of the call. Among them, the results from `first_bits` on are
// bits, and no gradient flows through the results in `fixed`. The later results are saved for the backward, unless `saved` is
// present. `saved` then contains, for each tensor that the backward needs, its position among the arguments and results, or no
// position if the tensor is absent. `of_call`: true if the saved tensors begin with the present tensors of the call.
struct Forward {
  SharedProgram program;
  std::size_t first_bits, first_kept;
  std::vector<std::size_t> fixed;
  std::optional<std::vector<std::optional<std::size_t>>> saved;
  bool of_call;
};

// A registered backward. It runs for arguments with these layouts if exactly the gradients that `needed` marks are
// needed.
struct Backward {
  std::vector<std::optional<Layout>> layouts;
  std::vector<bool> needed;
  SharedProgram program;
  bool has_reads; // true if formulas read Python values, which must be unchanged

  bool is_like(const variable_list& tensors, const std::vector<bool>& needs) const {
    const auto has_layout = [](const at::Tensor& tensor, const std::optional<Layout>& layout) {
      return tensor.defined() == layout.has_value() && (!layout || layout->is_of(tensor));
    };
    return needs == needed && std::equal(tensors.begin(), tensors.end(), layouts.begin(), layouts.end(), has_layout);
  }
};

std::vector<std::optional<Layout>> layouts(const Tensors& tensors) {
  std::vector<std::optional<Layout>> result;
  for (const auto& tensor : tensors)
    result.push_back(tensor ? std::optional<Layout>(*tensor) : std::nullopt);
  return result;
}

constexpr std::size_t max_backwards = 16; // maximum number of registered backwards of a scan

// The registered backwards of a scan.
class Backwards {
 public:
  void add(std::shared_ptr<const Backward> backward) {
    std::shared_ptr<const Backward> oldest; // destroyed after the lock is released
    const std::lock_guard<std::mutex> lock(mutex_);
    backwards_.insert(backwards_.begin(), std::move(backward));
    if (backwards_.size() > max_backwards) {
      oldest = std::move(backwards_.back());
      backwards_.pop_back();
    }
  }

  // Returns the registered backward for arguments with these layouts and for the needed gradients, or null.
  std::shared_ptr<const Backward> find(const variable_list& tensors, const std::vector<bool>& needed) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& backward : backwards_)
      if (backward->is_like(tensors, needed))
        return backward;
    return nullptr;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<const Backward>> backwards_;
};

class Scan : public torch::CustomClassHolder {
 public:
  // `owner`: function that returns the `Owner`, which computes gradients in Python. If the owner is freed, the function returns
  // None or raises an error: see `_find_owner`. The scan holds no reference to the owner: the owner's step may refer to the
  // neuron, and the neuron to this scan in the graph of its last state. Python could not detect such a reference cycle.
  // `is_present`: for each tensor of a call, true if it is present. Absent tensors are initial states of zeros.
  Scan(
      py::object owner,
      std::vector<bool> is_present,
      SharedProgram program,
      std::size_t first_bits,
      std::size_t first_kept,
      std::vector<std::size_t> fixed,
      std::optional<std::vector<std::optional<std::size_t>>> saved,
      bool links,
      bool of_call)
      : is_present(std::move(is_present)),
        links(links),
        forward{std::move(program), first_bits, first_kept, std::move(fixed), std::move(saved), of_call},
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

  void follow(const Tensors& given, std::vector<bool> needed, SharedProgram program, bool has_reads) {
    backwards->add(std::make_shared<Backward>(Backward{layouts(given), std::move(needed), std::move(program), has_reads}));
  }

  // Returns a scan that shares the backwards of this scan. `program` is the forward of the returned scan, and also
  // computes some of this scan's tensors. `program` takes the present tensors of a call, with other objects in place of
  // the computed tensors, and additional tensors. `saved` selects the tensors that the backward receives.
  c10::intrusive_ptr<Scan> after(SharedProgram program, std::vector<std::optional<std::size_t>> saved) const {
    auto scan = c10::make_intrusive<Scan>(
        owner_, is_present, std::move(program), forward.first_bits, forward.first_kept, forward.fixed, std::move(saved), links,
        true);
    scan->backwards = backwards;
    return scan;
  }

  const std::vector<bool> is_present;
  const bool links; // true if gradients of later results bypass the hooks of the first result
  const Forward forward;
  std::shared_ptr<Backwards> backwards = std::make_shared<Backwards>();

 private:
  py::object owner_;
};

// Calls without gradients, on tensors of several layouts.
class Calls {
 public:
  void add(const Tensors& tensors, SharedProgram program) {
    auto call = std::make_shared<RegisteredCall>(RegisteredCall{layouts(tensors), std::move(program)});
    const std::lock_guard<std::mutex> lock(mutex_);
    calls_.push_back(std::move(call));
  }

  // Returns no value if no program is registered for these layouts, or if a dispatch mode is active.
  std::optional<variable_list> run(const Tensors& tensors) const {
    const auto call = find(tensors);
    if (call == nullptr || c10::impl::TorchDispatchModeTLS::any_modes_set())
      return std::nullopt;
    const auto arguments = present(tensors);
    const py::gil_scoped_release without_gil;
    return call->program->run(arguments);
  }

 private:
  struct RegisteredCall {
    std::vector<std::optional<Layout>> tensor_layouts;
    SharedProgram program;
  };

  std::shared_ptr<const RegisteredCall> find(const Tensors& tensors) const {
    const auto has_layout = [](const std::optional<at::Tensor>& tensor, const std::optional<Layout>& layout) {
      return tensor.has_value() == layout.has_value() && (!layout || layout->is_of(*tensor));
    };
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& call : calls_)
      if (std::equal(tensors.begin(), tensors.end(), call->tensor_layouts.begin(), call->tensor_layouts.end(), has_layout))
        return call;
    return nullptr;
  }

  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<const RegisteredCall>> calls_;
};

struct ScanBackward : torch::autograd::Function<ScanBackward> {
  // `tensors`: the present tensors of a call.
  static variable_list forward(AutogradContext* context, const c10::intrusive_ptr<Scan>& scan, at::TensorList tensors) {
    const auto& [program, first_bits, first_kept, fixed, positions, of_call] = scan->forward;
    variable_list saved, results = program->run(tensors);
    if (positions) {
      for (const auto& place : *positions)
        saved.push_back(!place ? at::Tensor() : *place < tensors.size() ? tensors[*place] : results[*place - tensors.size()]);
    } else {
      saved.assign(tensors.begin(), tensors.end());
      for (auto i = first_kept; i < results.size(); ++i)
        saved.push_back(std::move(results[i]));
    }
    results.resize(first_kept);
    context->save_for_backward(std::move(saved));
    context->set_materialize_grads(false);
    context->saved_data["scan"] = c10::IValue::make_capsule(scan);
    context->saved_data["count"] = static_cast<std::int64_t>(tensors.size());
    if (!fixed.empty()) {
      variable_list constants;
      for (const auto i : fixed)
        constants.push_back(results[i]);
      context->mark_non_differentiable(constants);
    }
    return results;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto scan = c10::static_intrusive_pointer_cast<Scan>(context->saved_data["scan"].toCapsule());
    variable_list arguments;
    try {
      arguments = context->get_saved_variables();
    } catch (const c10::Error& error) {
      TORCH_CHECK(std::string(error.what_without_backtrace()).find("second time") == std::string::npos,
                  "backward a second time through a scan whose graph an earlier backward has freed. If this is the "
                  "next training step, a state that the scan returned still belongs to the graph of an earlier "
                  "step: reset it between sequences (functional.reset_net(net), neuron.reset()), or cut it off "
                  "between parts of one sequence (functional.detach_net(net), neuron.detach()). To go through one "
                  "graph twice, give the first backward retain_graph=True.");
      throw;
    }
    const auto count = static_cast<std::size_t>(std::count(scan->is_present.begin(), scan->is_present.end(), true));
    std::vector<bool> needed;
    for (std::size_t i = 0; i < count; ++i)
      needed.push_back(context->needs_input_grad(i));
    gradients.resize(scan->forward.first_bits);
    if (scan->links)
      check_hooks(*scan, gradients);
    for (auto& gradient : gradients)
      arguments.push_back(std::move(gradient));
    // If kernels cannot read an argument, Python raises an error with a clear message.
    const bool refused = c10::impl::TorchDispatchModeTLS::any_modes_set() || has_unreadable(arguments);
    const auto registered = at::GradMode::is_enabled() || refused ? nullptr : scan->backwards->find(arguments, needed);
    variable_list results{at::Tensor()}; // the gradient of `scan`, which is not a tensor
    if (registered != nullptr && (!registered->has_reads || reads_hold(*scan)))
      append(results, registered->program->run(arguments));
    else
      append(results, compute_in_python(*scan, arguments, needed));
    // Additional tensors have no gradients.
    results.resize(1 + static_cast<std::size_t>(context->saved_data["count"].toInt()));
    return results;
  }

 private:
  static void append(variable_list& list, variable_list values) {
    for (auto& tensor : values)
      list.push_back(std::move(tensor));
  }

  // Raises an error if the first result has hooks, and a gradient arrives through another result. The hooks would miss
  // this gradient.
  static void check_hooks(const Scan& scan, const variable_list& gradients) {
    if (std::none_of(gradients.begin() + 1, gradients.end(), [](const at::Tensor& tensor) { return tensor.defined(); }))
      return;
    const auto node = torch::autograd::get_current_node();
    if (node == nullptr || (node->tensor_pre_hooks().empty() && node->retains_grad_hooks().empty()))
      return;
    py::gil_scoped_acquire gil;
    try {
      scan.owner(true).attr("refuse_hooks")();
    } catch (py::error_already_set& error) {
      rethrow(error);
    }
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
      rethrow(error);
    }
  }

  static variable_list compute_in_python(const Scan& scan, const variable_list& arguments, const std::vector<bool>& needed) {
    py::gil_scoped_acquire gil;
    try {
      py::list list, needs;
      std::size_t next = 0, need = 0;
      for (const bool is_present : scan.is_present) {
        if (scan.forward.of_call)
          list.append(is_present ? py::cast(arguments[next++]) : py::none());
        needs.append(is_present && needed[need++]);
      }
      for (; next < arguments.size(); ++next)
        list.append(arguments[next].defined() ? py::cast(arguments[next]) : py::none());
      const auto gradients = scan.owner(true).attr("gradients")(list, needs).cast<Tensors>();
      variable_list results;
      for (std::size_t i = 0; i < scan.is_present.size(); ++i)
        if (scan.is_present[i])
          results.push_back(gradients[i].value_or(at::Tensor()));
      return results;
    } catch (py::error_already_set& error) {
      rethrow(error);
    }
  }
};

variable_list Scan::run(const Tensors& tensors) {
  const auto arguments = present(tensors);
  const auto self = c10::intrusive_ptr<Scan>::reclaim_copy(this);
  const py::gil_scoped_release without_gil;
  return ScanBackward::apply(self, at::TensorList(arguments));
}

// Runs calls that are like an earlier call. Compares everything on which a call may depend, except for values in memory
// and other Python objects.
class Again {
 public:
  // `tensors`: the tensors of the earlier call, whose settings are active now. `scan` or `program` runs the calls.
  Again(const Tensors& tensors, c10::intrusive_ptr<Scan> scan, SharedProgram program)
      : scan_(std::move(scan)),
        program_(std::move(program)),
        expected_(layouts(tensors)),
        grad_(at::GradMode::is_enabled()),
        keys_(c10::impl::tls_local_dispatch_key_set()),
        autocast_(autocast(tensors)) {
    for (const auto& tensor : tensors)
      requires_grad_.push_back(tensor && tensor->requires_grad());
  }

  // `objects`: tensors, None, or any other Python objects. Returns no value for a call that differs from the earlier
  // call.
  std::optional<variable_list> run(const py::tuple& objects) const {
    Tensors tensors;
    tensors.reserve(objects.size());
    for (const auto object : objects) {
      if (!object.is_none() && !THPVariable_CheckExact(object.ptr()))
        return std::nullopt; // an instance of a subclass, or not a tensor
      tensors.push_back(object.is_none() ? std::nullopt : std::optional(THPVariable_Unpack(object.ptr())));
    }
    if (!is_like(tensors))
      return std::nullopt;
    if (scan_)
      return scan_->run(tensors);
    const auto arguments = present(tensors);
    const py::gil_scoped_release without_gil;
    return program_->run(arguments);
  }

 private:
  bool is_like(const Tensors& tensors) const {
    const auto keys = c10::impl::tls_local_dispatch_key_set(); // modes, transforms, tracers, inference mode, autocast
    if (torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr)
      return false;
    if (at::GradMode::is_enabled() != grad_ || tensors.size() != expected_.size() || !(keys.included_ == keys_.included_) ||
        !(keys.excluded_ == keys_.excluded_) || autocast(tensors) != autocast_)
      return false;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto& tensor = tensors[i];
      if (tensor.has_value() != expected_[i].has_value())
        return false;
      if (tensor && (!expected_[i]->is_of(*tensor) || (grad_ && tensor->requires_grad() != requires_grad_[i])))
        return false;
    }
    return true;
  }

  static std::optional<at::ScalarType> autocast(const Tensors& tensors) {
    const auto kind = tensors.front()->device().type();
    return at::autocast::is_autocast_enabled(kind) ? std::optional(at::autocast::get_autocast_dtype(kind)) : std::nullopt;
  }

  c10::intrusive_ptr<Scan> scan_;
  SharedProgram program_;
  std::vector<std::optional<Layout>> expected_;
  std::vector<bool> requires_grad_;
  bool grad_;
  c10::impl::LocalDispatchKeySet keys_;
  std::optional<at::ScalarType> autocast_;
};

// The bits of a tensor, which autograd saves instead of the tensor.
struct Packed {
  py::object bits; // Python object, which Python unpacks if `reader` cannot
  at::Tensor packed;
  std::vector<std::int64_t> sizes, strides;
  at::ScalarType dtype;
  // Returns all values as a tensor of one dimension; null if only Python unpacks the bits.
  std::shared_ptr<const Calls> reader;
};

// Hooks for tensors that autograd saves. They save most tensors unchanged, and other objects instead of the remaining tensors.
class SavingHooks {
 public:
  // `packed`: maps a tensor to an object that is saved instead, or to None. `unpacked`: maps this object to the tensor. `views`,
  // `layers`: names of nodes without "Backward" and digits. Results of `layers`, and views of them, are saved unchanged.
  SavingHooks(
      py::object packed,
      py::object unpacked,
      py::object counted,
      std::size_t fewest,
      std::unordered_set<std::string> views,
      std::unordered_set<std::string> layers)
      : packed_(std::move(packed)),
        unpacked_(std::move(unpacked)),
        counted_(std::move(counted)),
        fewest_(fewest),
        views_(std::move(views)),
        layers_(std::move(layers)) {}

  // Saves `bits` instead of each tensor that covers exactly the memory of `spikes`, as long as the memory does not change. Keeps
  // only a weak reference to `bits`.
  void note(const at::Tensor& spikes, const py::object& bits, std::shared_ptr<const Calls> reader) {
    if (spikes.is_inference() || !is_whole(spikes))
      return;
    if (noted_.size() >= most_) {
      std::erase_if(noted_, [](const auto& pair) { return pair.second.storage.expired(); });
      most_ = std::max(most_, 2 * noted_.size());
    }
    const auto& storage = spikes.storage();
    noted_.insert_or_assign(
        storage.unsafeGetStorageImpl(),
        Noted{storage.getWeakStorageImpl(), spikes._version(), spikes.scalar_type(),
              py::weakref(bits), std::move(reader), false});
  }

  void clear() {
    noted_.clear();
  }

  py::object pack(const py::object& given) {
    const auto& tensor = THPVariable_Unpack(given.ptr());
    if (THPVariable_CheckExact(given.ptr()) && is_considered(tensor)) {
      if (auto packed = noted(tensor))
        return std::move(*packed);
      if (may_be_spikes(tensor)) {
        auto packed = packed_(given);
        if (!packed.is_none())
          return packed;
      }
    }
    return py::cast(Whole{given, tensor.is_inference() ? -1 : static_cast<std::int64_t>(tensor._version())});
  }

  py::object unpack(const py::object& kept) const {
    if (py::isinstance<Packed>(kept)) {
      const auto& packed = kept.cast<const Packed&>();
      const auto values = packed.reader ? packed.reader->run({packed.packed}) : std::nullopt;
      if (values && values->front().numel() == c10::multiply_integers(packed.sizes))
        return py::cast(values->front().as_strided(packed.sizes, packed.strides));
    }
    if (!py::isinstance<Whole>(kept))
      return unpacked_(kept);
    const auto& whole = kept.cast<const Whole&>();
    const auto& tensor = THPVariable_Unpack(whole.tensor.ptr());
    TORCH_CHECK(
        whole.version < 0 || static_cast<std::int64_t>(tensor._version()) == whole.version,
        "a tensor of shape ", tensor.sizes(), " that the backward needs was changed in place since the forward (version ",
        tensor._version(), " instead of ", whole.version, "), as by an optimizer's step. Call backward() before that, or "
        "change a copy.");
    return whole.tensor;
  }

  // A tensor that autograd saves unchanged.
  struct Whole {
    py::object tensor;
    std::int64_t version; // autograd compares no versions if hooks are active; -1 if there is no version
  };

 private:
  // The weak reference prevents another storage from having the same address, which is the key.
  struct Noted {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::uint32_t version;
    at::ScalarType dtype;
    py::weakref bits;
    std::shared_ptr<const Calls> reader;
    bool is_counted;
  };

  static bool is_whole(const at::Tensor& tensor) {
    return tensor.has_storage() && !tensor.is_neg() && tensor.nbytes() == tensor.storage().nbytes() &&
        tensor.is_non_overlapping_and_dense();
  }

  bool is_considered(const at::Tensor& tensor) const {
    return tensor.grad_fn() != nullptr && tensor.nbytes() >= fewest_ && at::isFloatingType(tensor.scalar_type());
  }

  std::optional<py::object> noted(const at::Tensor& tensor) {
    const auto entry = noted_.find(tensor.storage().unsafeGetStorageImpl());
    if (entry == noted_.end())
      return std::nullopt;
    auto& note = entry->second;
    if (tensor._version() != note.version || tensor.scalar_type() != note.dtype || !is_whole(tensor))
      return std::nullopt;
    py::object bits = note.bits();
    if (bits.is_none())
      return std::nullopt;
    if (!std::exchange(note.is_counted, true))
      counted_(tensor.nbytes(), bits, true);
    const auto packed = bits.attr("packed").cast<at::Tensor>();
    return py::cast(Packed{std::move(bits), packed, tensor.sizes().vec(), tensor.strides().vec(), note.dtype, note.reader});
  }

  bool may_be_spikes(const at::Tensor& tensor) const {
    for (auto node = tensor.grad_fn();; node = node->next_edge(0).function) {
      auto name = node == nullptr ? std::string() : node->name();
      if (name.empty() || name == "torch::autograd::AccumulateGrad")
        return false;
      name.erase(name.find_last_not_of("0123456789") + 1);
      constexpr std::string_view ending = "Backward";
      if (name.ends_with(ending))
        name.resize(name.size() - ending.size());
      if (layers_.contains(name))
        return false;
      if (!views_.contains(name) || node->num_outputs() != 1)
        return true;
    }
  }

  py::object packed_, unpacked_, counted_;
  std::size_t fewest_, most_ = 64;
  std::unordered_set<std::string> views_, layers_;
  std::unordered_map<c10::StorageImpl*, Noted> noted_;
};

} // namespace flexsn

using namespace flexsn;

PYBIND11_MODULE(flexsn_launcher, module) {
  module.def("on_gpu", [](std::uintptr_t launch, std::uintptr_t together, std::uintptr_t stream) {
    launch_on_gpu = reinterpret_cast<LaunchOnGpu>(launch);
    launch_together = reinterpret_cast<LaunchTogether>(together);
    current_stream = reinterpret_cast<CurrentStream>(stream);
  });
  py::class_<Program, std::shared_ptr<Program>>(module, "Program")
      .def(py::init<std::size_t, std::vector<std::size_t>>())
      .def("allocate", [](Program& program, std::size_t into, std::vector<std::int64_t> sizes,
                          std::vector<std::int64_t> strides, const at::Tensor& like) {
        program.add(Allocated{into, std::move(sizes), std::move(strides), like.options()});
      })
      .def("fix", [](Program& program, std::size_t into, at::Tensor tensor) { program.add(Fixed{into, std::move(tensor)}); })
      .def("view", [](Program& program, std::size_t into, std::size_t base, std::vector<std::int64_t> sizes,
                      std::vector<std::int64_t> strides, std::int64_t offset) {
        program.add(Viewed{into, base, std::move(sizes), std::move(strides), offset});
      })
      .def("launch", [](Program& program, std::uintptr_t entry, std::vector<std::size_t> places,
                        std::vector<std::int64_t> offsets, std::vector<std::int64_t> numbers, unsigned programs,
                        unsigned beside, unsigned threads, unsigned shared, bool together, py::object kept) {
        program.add(Kernel{entry, std::move(places), std::move(offsets), std::move(numbers), programs, beside, threads,
                           shared, together, std::move(kept)});
      })
      .def("call", [](Program& program, const std::string& name, const std::string& overload, const py::tuple& args,
                      const py::dict& kwargs, const variable_list& stand_ins, const std::vector<std::size_t>& places,
                      std::vector<std::size_t> into) {
        program.add(Operator::of(name, overload, args, kwargs, stand_ins, places, std::move(into)));
      })
      .def("check", [](Program& program, at::Tensor number, py::object check) {
        program.add(Checked{std::move(number), std::move(check)});
      })
      .def("bump", [](Program& program, std::vector<std::size_t> places) { program.add(Bumped{std::move(places)}); })
      .def("returns", &Program::returns)
      .def("run", torch::wrap_pybind_function([](const Program& program, const Tensors& tensors) {
        const auto these = present(tensors);
        const py::gil_scoped_release others_may_run;
        return program.run(these);
      }));
  py::class_<Packed>(module, "Packed")
      .def_readonly("bits", &Packed::bits)
      .def_readonly("shape", &Packed::sizes)
      .def_readonly("strides", &Packed::strides)
      .def_property_readonly("dtype", [](const Packed& packed) {
        return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(packed.dtype)));
      });
  py::class_<SavingHooks::Whole>(module, "Whole").def_readonly("tensor", &SavingHooks::Whole::tensor);
  py::class_<SavingHooks>(module, "SavingHooks")
      .def(py::init<
           py::object,
           py::object,
           py::object,
           std::size_t,
           std::unordered_set<std::string>,
           std::unordered_set<std::string>>())
      .def("note", &SavingHooks::note)
      .def("clear", &SavingHooks::clear)
      .def("pack", torch::wrap_pybind_function([](SavingHooks& hooks, const py::object& given) {
        return hooks.pack(given);
      }))
      .def("unpack", torch::wrap_pybind_function([](const SavingHooks& hooks, const py::object& kept) {
        return hooks.unpack(kept);
      }));
  py::class_<Calls, std::shared_ptr<Calls>>(module, "Calls")
      .def(py::init<>())
      .def("add", &Calls::add)
      .def("run", torch::wrap_pybind_function([](const Calls& calls, const Tensors& tensors) { return calls.run(tensors); }));
  py::class_<Scan, c10::intrusive_ptr<Scan>>(module, "Scan")
      .def(py::init<
           py::object,
           std::vector<bool>,
           std::shared_ptr<Program>,
           std::size_t,
           std::size_t,
           std::vector<std::size_t>,
           std::optional<std::vector<std::optional<std::size_t>>>,
           bool,
           bool>())
      .def("run", torch::wrap_pybind_function([](Scan& scan, const Tensors& tensors) {
        return scan.run(tensors); // wrapped, so that torch's exceptions are converted, for example if memory runs out
      }))
      .def("after", &Scan::after)
      .def("follow", &Scan::follow);
  py::class_<Again>(module, "Again")
      .def(py::init<const Tensors&, c10::intrusive_ptr<Scan>, std::shared_ptr<Program>>())
      .def("run", torch::wrap_pybind_function([](const Again& again, const py::tuple& given) { return again.run(given); }));
}
