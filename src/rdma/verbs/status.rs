//! Work completion statuses of libibverbs in our words.

use rdma_sys::ibv_wc_status as wc;

use crate::rdma::WcStatus;

/// Maps `enum ibv_wc_status`.
pub(super) fn from_wc(status: wc::Type) -> WcStatus {
    match status {
        wc::IBV_WC_SUCCESS => WcStatus::Success,
        wc::IBV_WC_LOC_LEN_ERR => WcStatus::LocalLength,
        wc::IBV_WC_LOC_PROT_ERR => WcStatus::LocalProtection,
        wc::IBV_WC_WR_FLUSH_ERR => WcStatus::Flushed,
        wc::IBV_WC_REM_INV_REQ_ERR => WcStatus::RemoteInvalidRequest,
        wc::IBV_WC_REM_ACCESS_ERR => WcStatus::RemoteAccess,
        wc::IBV_WC_REM_OP_ERR => WcStatus::RemoteOperation,
        wc::IBV_WC_RETRY_EXC_ERR => WcStatus::RetryExceeded,
        wc::IBV_WC_RNR_RETRY_EXC_ERR => WcStatus::RnrRetryExceeded,
        other => WcStatus::Other(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers are those of the header, `infiniband/verbs.h`: they reach us from a C library, not by name.
    #[test]
    fn numbers_are_the_headers() {
        let known = [
            (0, WcStatus::Success),
            (1, WcStatus::LocalLength),
            (4, WcStatus::LocalProtection),
            (5, WcStatus::Flushed),
            (9, WcStatus::RemoteInvalidRequest),
            (10, WcStatus::RemoteAccess),
            (11, WcStatus::RemoteOperation),
            (12, WcStatus::RetryExceeded),
            (13, WcStatus::RnrRetryExceeded),
        ];
        for number in 0..64 {
            let expected =
                known.iter().find(|(n, _)| *n == number).map_or(WcStatus::Other(number), |(_, status)| *status);
            assert_eq!(from_wc(number), expected, "{number}");
        }
    }
}
