//! Model-specific registers that an embedder emulates instead of KVM.

use std::sync::Arc;

use super::msrs::{MsrDevice, VcpuMsrs};

/// The embedder's device that emulates some registers of a machine.
pub type Emulation = Arc<dyn MsrDevice>;

/// The emulated registers of a vCPU.
pub type VcpuEmulation = Box<dyn VcpuMsrs>;
