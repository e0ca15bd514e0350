package cli

import (
	"encoding/json"
	"fmt"
	"net/http"

	"github.com/spf13/cobra"

	"github.com/dunlin-project/dunlin/cli/client"
	"github.com/dunlin-project/dunlin/controlplane"
)

func (a *app) nodeCmd() *cobra.Command {
	c := &cobra.Command{
		Use: "node", Short: "Ban a node that was lost or stolen", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	revoke := &cobra.Command{
		Use:   "revoke NAME",
		Short: "Ban a node's key for ever and cut it off",
		Long: `Ban a node's key for ever and cut it off.

The node cannot come back, under no name and with no join line; a machine that
shall, makes itself a new key first. Its site gets new gossip keys. The command
prints the Secrets that the node's pods refer to: whoever has the node's disk
may have them, so replace them. What runs on the node itself cannot be stopped
from here; its pods are started elsewhere once its lease has run out. The Node
object stays: 'dunlin delete node NAME' removes it.`,
		Example: `  dunlin node revoke greenhouse-7`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := a.client()
			if err != nil {
				return err
			}
			body, err := json.Marshal(controlplane.RevokeRequest{Node: args[0]})
			if err != nil {
				return fmt.Errorf("make request: %w", err)
			}
			var reply controlplane.RevokeReply
			r := client.Request{Method: http.MethodPost, Path: controlplane.RevokePath, ContentType: client.JSON, Body: body}
			if err := cl.JSON(cmd.Context(), r, &reply); err != nil {
				return err
			}
			a.notef("node %s revoked: its key is banned and its connections are cut\n", reply.Node)
			if len(reply.Secrets) == 0 {
				a.notef("its pods refer to no Secret\n")
				return nil
			}
			a.notef("it held these Secrets (namespace/name): replace them\n")
			for _, s := range reply.Secrets {
				a.printf("%s\n", s)
			}
			return nil
		},
	}
	c.AddCommand(revoke)
	return c
}
