//! What an embedder answers in KVM's place: model-specific registers.

use std::sync::Arc;

use super::msrs::{MsrDevice, VcpuMsrs};

/// A machine's registers that the embedder answers.
pub type Emulation = Arc<dyn MsrDevice>;

/// Those of a vCPU.
pub type VcpuEmulation = Box<dyn VcpuMsrs>;
