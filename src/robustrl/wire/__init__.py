"""The wire between members: frames, a mutual handshake with the job's secret, and calls.

It stands beneath the rooms because three of them talk: the ledger, the weight directory and the supervisor. Nothing
is unpickled, every length is checked before memory is taken, and no byte is served before the handshake is done.
"""

from robustrl.wire.address import Address, bind
from robustrl.wire.handshake import PROTOCOL_VERSION, Secret
from robustrl.wire.rpc import Call, Handler, RpcClient, RpcServer

__all__ = ["PROTOCOL_VERSION", "Address", "Call", "Handler", "RpcClient", "RpcServer", "Secret", "bind"]
