package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/spf13/cobra"

	"github.com/dunlin-project/dunlin/cli/client"
	"github.com/dunlin-project/dunlin/controlplane"
)

func (a *app) nodeCmd() *cobra.Command {
	c := &cobra.Command{
		Use: "node", Short: "Say that a node is lost or stolen, or may follow a restored state", Args: cobra.NoArgs,
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
from here; its pods are started elsewhere once its lease has run out, but those
of StatefulSets, of which there may be one only, and those of a site that is
wholly silent, after 'dunlin node declare-dead NAME'. The Node object stays and
says that it is revoked: 'dunlin delete node NAME' removes it.`,
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
	c.AddCommand(revoke, a.declareDeadCmd(), a.acceptRestoreCmd())
	return c
}

func (a *app) declareDeadCmd() *cobra.Command {
	var yes bool
	c := &cobra.Command{
		Use:   "declare-dead NAME [--yes]",
		Short: "Say that a silent node does not run any more, so that its pods can be started elsewhere",
		Long: `Say that a silent node does not run any more, so that its pods can be started
elsewhere: all of them, also those of StatefulSets, of which there may be one
only, and those of a site that is wholly silent.

Be sure that the machine is off, or will never be reached again: what runs on it
cannot be stopped from here. The node cannot come back under its identity. If it
does come back, it is refused, stops the pods that the cluster gave it, and
says what to do: 'dunlin agent reset' on that machine, then join it anew.
A node whose lease is renewed is not declared dead.`,
		Example: `  dunlin node declare-dead greenhouse-7
  dunlin node declare-dead greenhouse-7 --yes`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if !yes && !a.confirm("Is the machine of node "+args[0]+" off for good? Its pods are started elsewhere, and it cannot come back under its identity.") {
				return errors.New("nothing was changed")
			}
			cl, err := a.client()
			if err != nil {
				return err
			}
			body, err := json.Marshal(controlplane.DeadRequest{Node: args[0]})
			if err != nil {
				return fmt.Errorf("make request: %w", err)
			}
			var reply controlplane.DeadReply
			r := client.Request{Method: http.MethodPost, Path: controlplane.DeadPath, ContentType: client.JSON, Body: body}
			if err := cl.JSON(cmd.Context(), r, &reply); err != nil {
				return err
			}
			a.notef("node %s is declared dead; released (namespace/name): %d pods\n", reply.Node, len(reply.Pods))
			for _, p := range reply.Pods {
				a.printf("%s\n", p)
			}
			a.notef("when the machine is back: 'dunlin agent reset' there, and a new join line; 'dunlin delete node %s' frees the name\n", reply.Node)
			return nil
		},
	}
	c.Flags().BoolVar(&yes, "yes", false, "do not ask")
	return c
}
