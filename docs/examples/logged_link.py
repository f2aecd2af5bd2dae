"""A link decorator of one's own."""

from thinwire.links import LinkDecorator


class Logged(LinkDecorator):
    """Prints every exchange that worker 0 begins, with the time on its clock."""

    def post(self, payload, op):
        if self.rank == 0:
            print(f"{self.now():.3f} s: {op} of {payload.nbytes} bytes for the {payload.purpose}")
        return self.link.post(payload, op)
