//! Which provider to serve on, decided at run time.

use std::str::FromStr;

use tracing::info;

#[cfg(feature = "verbs")]
use crate::rdma::verbs::Verbs;
use crate::target::{Target, TargetBuilder, TargetError};

/// Which provider to serve on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ProviderChoice {
    /// A verbs device if this machine has one, else the software stack.
    #[default]
    Auto,
    /// A NIC, rdma_rxe or siw through libibverbs and librdmacm.
    Verbs,
    /// farside's own RoCEv2 over UDP.
    Soft,
}

impl FromStr for ProviderChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "verbs" => Ok(Self::Verbs),
            "soft" => Ok(Self::Soft),
            _ => Err(format!("{text:?} is not a provider; use auto, verbs or soft")),
        }
    }
}

impl TargetBuilder {
    /// Starts everything on the chosen provider, or nothing.
    pub fn start_on(self, choice: ProviderChoice) -> Result<Target, TargetError> {
        match choice {
            ProviderChoice::Verbs => self.start_verbs(),
            ProviderChoice::Soft => self.start_soft(),
            ProviderChoice::Auto if has_verbs_device() => self.start_verbs(),
            ProviderChoice::Auto => {
                info!("no RDMA device: using the software provider");
                self.start_soft()
            }
        }
    }

    #[cfg(feature = "verbs")]
    fn start_verbs(self) -> Result<Target, TargetError> {
        self.start(Verbs::open()?)
    }

    #[cfg(not(feature = "verbs"))]
    fn start_verbs(self) -> Result<Target, TargetError> {
        Err(TargetError {
            object: "provider verbs".into(),
            reason: "this binary was built without it".into(),
            remedy: "build with the cargo feature `verbs`, or use the provider soft".into(),
        })
    }

    fn start_soft(self) -> Result<Target, TargetError> {
        Err(TargetError {
            object: "provider soft".into(),
            reason: "it is not part of this version".into(),
            remedy: "use an RDMA device: rdma link add rxe0 type rxe netdev eth0".into(),
        })
    }
}

#[cfg(feature = "verbs")]
fn has_verbs_device() -> bool {
    Verbs::device_names().is_ok_and(|names| !names.is_empty())
}

#[cfg(not(feature = "verbs"))]
fn has_verbs_device() -> bool {
    false
}
