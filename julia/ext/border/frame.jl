# fatou-ignore-file discouraged-function: memory of XLA and of Python is reached through pointers, and every one is loaded, stored or wrapped within the call that it was given to.
# The call frame of XLA's typed FFI: the structs of jaxlib's include/xla/ffi/api/c_api.h, field by
# field. Julia lays isbits structs out as C does, so no offset is written down here; the tests
# compare `fieldoffset` with what a C compiler makes of the header.

const API_MAJOR = Int32(0)
const API_MINOR = Int32(3)

const EXTENSION_METADATA = Int32(1)
const STAGE_EXECUTE = Int32(3)
const ERROR_INTERNAL = Int32(13)

struct ExtensionBase
    struct_size::Csize_t
    type::Cint
    next::Ptr{ExtensionBase}
end

struct ApiVersion
    struct_size::Csize_t
    extension_start::Ptr{ExtensionBase}
    major_version::Cint
    minor_version::Cint
end

struct Metadata
    struct_size::Csize_t
    api_version::ApiVersion
    traits::UInt32
    state_type_id::Int64
end

struct MetadataExtension
    extension_base::ExtensionBase
    metadata::Ptr{Metadata}
end

struct Api
    struct_size::Csize_t
    extension_start::Ptr{ExtensionBase}
    api_version::ApiVersion
    internal_api::Ptr{Cvoid}
    error_create::Ptr{Cvoid}
end

struct ErrorCreateArgs
    struct_size::Csize_t
    extension_start::Ptr{ExtensionBase}
    message::Ptr{UInt8}
    errc::Cint
end

struct Buffer
    struct_size::Csize_t
    extension_start::Ptr{ExtensionBase}
    dtype::Cint
    data::Ptr{Cvoid}
    rank::Int64
    dims::Ptr{Int64}
end

struct Operands
    # XLA_FFI_Args and XLA_FFI_Rets have one layout
    struct_size::Csize_t
    extension_start::Ptr{ExtensionBase}
    size::Int64
    types::Ptr{Cint}
    buffers::Ptr{Ptr{Buffer}}
end

struct Scalar
    dtype::Cint
    value::Ptr{Cvoid}
end

struct Attributes
    struct_size::Csize_t
    extension_start::Ptr{ExtensionBase}
    size::Int64
    types::Ptr{Cint}
    names::Ptr{Ptr{Cvoid}}
    attrs::Ptr{Ptr{Cvoid}}
end

struct CallFrame
    struct_size::Csize_t
    extension_start::Ptr{ExtensionBase}
    api::Ptr{Api}
    ctx::Ptr{Cvoid}
    stage::Cint
    args::Operands
    rets::Operands
    attrs::Attributes
    future::Ptr{Cvoid}
end

@generated function field_pointer(p::Ptr{T}, ::Val{name}) where {T, name}
    i = findfirst(==(name), fieldnames(T))
    return :(Ptr{$(fieldtype(T, i))}(p + $(fieldoffset(T, i))))
end

# XLA asks a new handler which version of the interface it was written for.
function answer_metadata(frame::Ptr{CallFrame})
    extension = unsafe_load(field_pointer(frame, Val(:extension_start)))
    while extension != C_NULL
        if unsafe_load(field_pointer(extension, Val(:type))) == EXTENSION_METADATA
            metadata = unsafe_load(field_pointer(
                Ptr{MetadataExtension}(extension),
                Val(:metadata),
            ))
            version = field_pointer(metadata, Val(:api_version))
            unsafe_store!(field_pointer(version, Val(:major_version)), API_MAJOR)
            unsafe_store!(field_pointer(version, Val(:minor_version)), API_MINOR)
            unsafe_store!(field_pointer(metadata, Val(:traits)), UInt32(0))
            return true
        end
        extension = unsafe_load(field_pointer(extension, Val(:next)))
    end
    return false
end

# XLA copies the message, and owns the error that this returns.
function xla_error(frame::Ptr{CallFrame}, message::Ptr{UInt8})
    api = unsafe_load(field_pointer(frame, Val(:api)))
    create = unsafe_load(field_pointer(api, Val(:error_create)))
    size = fieldoffset(ErrorCreateArgs, 4) + sizeof(Cint)
    args = Ref(ErrorCreateArgs(size, C_NULL, message, ERROR_INTERNAL))
    return ccall(create, Ptr{Cvoid}, (Ref{ErrorCreateArgs},), args)
end

xla_error(frame::Ptr{CallFrame}, message::String) = GC.@preserve message xla_error(
    frame,
    pointer(message),
)

# The one attribute of a call is the number of its plan, an int64.
function plan_number(frame::Ptr{CallFrame})
    attributes = field_pointer(frame, Val(:attrs))
    values = unsafe_load(field_pointer(attributes, Val(:attrs)))
    scalar = Ptr{Scalar}(unsafe_load(values))
    return unsafe_load(Ptr{Int64}(unsafe_load(field_pointer(scalar, Val(:value)))))
end
