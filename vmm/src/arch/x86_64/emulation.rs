//! Registers that an embedder emulates instead of KVM: model-specific ones.

use std::sync::Arc;

use super::msrs::{MsrDevice, VcpuMsrs};

/// A machine's registers that the embedder emulates.
pub type Emulation = Arc<dyn MsrDevice>;

/// The emulated registers of a vCPU.
pub type VcpuEmulation = Box<dyn VcpuMsrs>;
