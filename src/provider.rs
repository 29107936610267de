//! Which provider to serve on, decided at run time.

use tracing::info;

use crate::config::ProviderChoice;
#[cfg(feature = "verbs")]
use crate::rdma::verbs::Verbs;
use crate::target::{Target, TargetBuilder, TargetError};

impl TargetBuilder {
    /// Starts everything on the chosen provider, or nothing.
    pub fn start_on(self, choice: ProviderChoice) -> Result<Target, TargetError> {
        match choice {
            choice if uses_verbs(choice) => self.start_verbs(),
            ProviderChoice::Auto => {
                info!("no RDMA device: using the software provider");
                self.start_soft()
            }
            _ => self.start_soft(),
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

/// Whether a choice comes to the verbs provider on this machine.
pub(crate) fn uses_verbs(choice: ProviderChoice) -> bool {
    match choice {
        ProviderChoice::Verbs => true,
        ProviderChoice::Soft => false,
        ProviderChoice::Auto => has_verbs_device(),
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
